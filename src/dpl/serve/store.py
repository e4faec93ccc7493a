"""Streams on disk: one folder per stream, with its snapshots.

    STATE/model.json                                 the model, method and settings that the streams belong to
    STATE/streams/<stream>/<seq>-<version>-<kind>/   one snapshot

`seq` counts the jobs of a stream. `version` is the `seq` at which the saved state was reached: a rollback saves an old
version under a new `seq`. One server at a time may use a folder; its lock ends with its process.
"""

import json
import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple
from urllib.parse import unquote

from torch import Tensor

import dpl
from dpl.core.errors import SettingError, SnapshotError
from dpl.core.files import clear_drafts, open_lock, remove_folder, sync_folder, write_file
from dpl.snapshot import read_manifest, read_snapshot, write_snapshot

__all__ = ["Kind", "SnapshotName", "StateDifference", "StreamSnapshot", "StreamStore", "is_stream_id"]

Kind = Literal["auto", "manual"]
_STREAM_ID = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,98}[A-Za-z0-9])?")
_NAME = re.compile(r"(\d{12})-(\d{12})-(auto|manual)")
_log = logging.getLogger("dpl.serve")


def is_stream_id(text: str) -> bool:
    """Return whether a text can be the name of a stream; it becomes the name of a folder."""
    return _STREAM_ID.fullmatch(text) is not None


class SnapshotName(NamedTuple):
    """The name of a snapshot; sorts by age."""

    seq: int
    version: int
    kind: str

    def __str__(self) -> str:
        return f"{self.seq:012d}-{self.version:012d}-{self.kind}"


@dataclass(frozen=True)
class StateDifference:
    """The tensors of a state that differ from the source state, and the names of tensors that it lacks."""

    changed: Mapping[str, Tensor] = field(default_factory=dict)
    removed: tuple[str, ...] = ()

    @property
    def size(self) -> int:
        """Bytes of all tensors."""
        return sum(value.numel() * value.element_size() for value in self.changed.values())


@dataclass(frozen=True)
class StreamSnapshot:
    """A stream's state as it is stored."""

    name: SnapshotName
    difference: StateDifference
    adapted: int = 0  # batches
    images: int = 0
    steps: int = 0  # of this process, when the snapshot was taken

    def describe(self) -> dict[str, Any]:
        """Return the name and size as they are shown in responses."""
        return {**self.name._asdict(), "bytes": self.difference.size}


class StreamStore:
    """The folder with all streams of one server."""

    def __init__(self, folder: Path, identity: Mapping[str, Any], keep: int) -> None:
        self.folder, self._identity, self._keep = folder.resolve(), dict(identity), keep
        self._streams = self.folder / "streams"
        self.folder.mkdir(parents=True, exist_ok=True)
        self._lock = open_lock(self.folder)
        if self._lock is None:
            raise SettingError(f"{self.folder} is in use by another server; choose another --state folder")
        try:
            self._check_owner(json.loads(json.dumps(identity)))
        except SettingError:
            self.close()
            raise
        self.problem = self._claim()  # why the folder cannot be written, if it cannot

    def _check_owner(self, identity: dict[str, Any]) -> None:
        """Refuse a folder of another model, or of several replicas."""
        for part in self.folder.glob("replica-*-of-*"):
            raise SettingError(
                f"{self.folder} was written by a server on Ray ({part.name}); start it with --engine ray and the same "
                "number of --replicas, or choose another --state folder"
            )
        mark = self.folder / "model.json"
        try:
            known = json.loads(mark.read_text()) if mark.exists() else {}
            different = [key for key, value in identity.items() if known.get(key, value) != value]
        except (ValueError, AttributeError, RecursionError, OSError) as error:
            raise SettingError(f"{mark}: damaged ({error}); choose another --state folder") from error
        if different:
            raise SettingError(
                f"{self.folder} holds streams of another model (different: {', '.join(different)}); "
                "choose another --state folder"
            )

    def _claim(self) -> str | None:
        """Clear what a killed server left, and record that the folder belongs to this model."""
        mark = self.folder / "model.json"
        try:
            self._streams.mkdir(exist_ok=True)
            for folder in (self.folder, self._streams, *filter(Path.is_dir, self._streams.iterdir())):
                clear_drafts(folder)
            if not mark.exists():
                write_file(mark, json.dumps({**self._identity, "dpl": dpl.__version__}, indent=2))
        except OSError as error:
            return str(error.strerror or error)
        return None

    def stream_ids(self) -> list[str]:
        """Return the streams that have a snapshot; a folder that no stream has made is named and left alone."""
        found = []
        for path in self._streams.iterdir() if self._streams.is_dir() else ():
            stream_id = unquote(path.name)
            if path.name[0] == "." or not any(_snapshots(path)):
                continue
            if is_stream_id(stream_id) and self._place(stream_id) == path:
                found.append(stream_id)
            else:
                _log.warning("%s is not the folder of a stream; it is not used", path)
        return sorted(found)

    def names(self, stream_id: str) -> list[SnapshotName]:
        """Return the names of a stream's snapshots, newest first."""
        return sorted(_snapshots(self._place(stream_id)), reverse=True)

    def write(self, stream_id: str, snapshot: StreamSnapshot) -> None:
        """Write a snapshot durably, then remove the oldest ones beyond the number to keep."""
        seq, version, kind = snapshot.name
        facts = {"stream": stream_id, "seq": seq, "version": version, "adapted": snapshot.adapted,
                 "images": snapshot.images, "removed": list(snapshot.difference.removed)}  # fmt: skip
        is_new = not self._place(stream_id).exists()
        write_snapshot(self._place(stream_id, snapshot.name), self._identity | facts, snapshot.difference.changed)
        if is_new:
            sync_folder(self._streams)
        same_kind = [name for name in self.names(stream_id) if name.kind == kind]
        for name in same_kind[self._keep :]:
            remove_folder(self._place(stream_id, name))

    def read(self, stream_id: str, name: SnapshotName) -> StreamSnapshot:
        """Read one snapshot and check every byte."""
        folder = self._place(stream_id, name)
        manifest, tensors = read_snapshot(folder)
        if [manifest.get(key) for key in ("stream", "seq", "version")] != [stream_id, name.seq, name.version]:
            raise SnapshotError(f"{folder} is the snapshot of another stream or moment")
        if not all(isinstance(key, str) for key in manifest["removed"]):
            raise SnapshotError(f"{folder}: expected names of tensors in removed, found {manifest['removed']!r:.80}")
        return StreamSnapshot(name, StateDifference(tensors, tuple(manifest["removed"])), *_counts(manifest))

    def counts(self, stream_id: str) -> tuple[int, int]:
        """Return the numbers of adapted batches and images of the newest snapshot, without reading its tensors."""
        for name in self.names(stream_id):
            with suppress(Exception):  # the next one may be good
                return _counts(read_manifest(self._place(stream_id, name)))
        return 0, 0

    def newest(
        self, stream_id: str, before: int | None = None, use: Callable[[StreamSnapshot], None] = lambda _: None
    ) -> tuple[StreamSnapshot | None, list[str]]:
        """Return the newest valid snapshot (of a version below `before`), and what was wrong with newer ones.

        `use` is called with it; if that fails, an older one is tried.
        """
        problems: list[str] = []
        for name in self.names(stream_id):
            if before is None or name.version < before:
                try:
                    snapshot = self.read(stream_id, name)
                    use(snapshot)
                    return snapshot, problems
                except Exception as error:  # whatever is wrong with one snapshot, an older one may be good
                    problems.append(f"{self._place(stream_id, name)}: {error}")
        return None, problems

    def size(self, stream_id: str) -> int:
        """Return the bytes of a stream's snapshots."""
        files = (file for name in self.names(stream_id) for file in self._place(stream_id, name).iterdir())
        return sum(file.stat().st_size for file in files)

    def delete(self, stream_id: str) -> None:
        """Remove a stream with all its snapshots."""
        if self._place(stream_id).exists():
            remove_folder(self._place(stream_id))

    def close(self) -> None:
        """Release the lock, so that another server can use the folder."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _place(self, stream_id: str, *snapshot: SnapshotName) -> Path:
        """Return the folder of a stream or of its snapshot; some file systems ignore case, so capitals are escaped."""
        name = "".join(f"%{ord(c):02x}" if c.isupper() else c for c in stream_id)
        return self._streams.joinpath(name, *map(str, snapshot))


def _counts(manifest: Mapping[str, Any]) -> tuple[int, int]:
    """Return the numbers of adapted batches and images; a forged manifest with a valid checksum may lack them."""
    adapted, images = manifest["adapted"], manifest["images"]
    if not all(isinstance(count, int) and count >= 0 for count in (adapted, images)):
        raise SnapshotError(f"expected counts of batches and images, found {adapted!r:.40} and {images!r:.40}")
    return adapted, images


def _snapshots(folder: Path) -> Iterator[SnapshotName]:
    for path in folder.iterdir() if folder.is_dir() else ():
        if match := _NAME.fullmatch(path.name):
            yield SnapshotName(int(match[1]), int(match[2]), match[3])
