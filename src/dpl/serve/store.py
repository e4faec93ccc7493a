"""Streams on disk: one folder per stream, with its snapshots.

    STATE/model.json                                 the model, method and settings that the streams belong to
    STATE/streams/<stream>/<seq>-<version>-<kind>/   one snapshot

`seq` counts the jobs of a stream. `version` is the `seq` at which the saved state was reached: a rollback saves an old
version under a new `seq`. One server at a time may use a folder; its lock ends with its process.
"""

import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal
from urllib.parse import unquote

from torch import Tensor

from dpl.core.errors import SettingError, SnapshotError
from dpl.core.files import clear_drafts, open_lock, remove_folder, sync_folder, write_file
from dpl.snapshot import read_manifest, read_snapshot, write_snapshot

__all__ = ["Kind", "SnapshotName", "StateDifference", "StreamSnapshot", "StreamStore"]

Kind = Literal["auto", "manual"]
_NAME = re.compile(r"(\d{12})-(\d{12})-(auto|manual)")


@dataclass(frozen=True, order=True)
class SnapshotName:
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


class StreamStore:
    """The folder with all streams of one server."""

    def __init__(self, folder: Path, identity: Mapping[str, Any], keep: int) -> None:
        self.folder = folder.resolve()
        self._streams = self.folder / "streams"
        self._keep = keep
        self.folder.mkdir(parents=True, exist_ok=True)
        self._lock = open_lock(self.folder)
        if self._lock is None:
            raise SettingError(f"{self.folder} is in use by another server; choose another --state folder")
        try:
            self.problem = self._claim(json.loads(json.dumps(identity)))
        except SettingError:
            self.close()
            raise

    def _claim(self, identity: dict[str, Any]) -> str | None:
        """Record that the folder belongs to this model; return why it cannot be written, if it cannot."""
        mark = self.folder / "model.json"
        for part in self.folder.glob("replica-*-of-*"):
            raise SettingError(
                f"{self.folder} was written by a server on Ray ({part.name}); start it with --engine ray and the same "
                "number of --replicas, or choose another --state folder"
            )
        if mark.exists():
            self._compare(mark, identity)
        try:
            self._streams.mkdir(exist_ok=True)
            for folder in (self.folder, self._streams, *filter(Path.is_dir, self._streams.iterdir())):
                clear_drafts(folder)
            if not mark.exists():
                write_file(mark, json.dumps(identity, indent=2))
        except OSError as error:
            return f"{self.folder}: {error.strerror or error}"
        return None

    def _compare(self, mark: Path, identity: dict[str, Any]) -> None:
        try:
            known = json.loads(mark.read_text())
            different = [key for key, value in identity.items() if known.get(key) != value]
        except (ValueError, AttributeError) as error:
            raise SettingError(f"{mark}: damaged ({error}); choose another --state folder") from error
        if different:
            raise SettingError(
                f"{self.folder} holds streams of another model (different: {', '.join(different)}); "
                "choose another --state folder"
            )

    def stream_ids(self) -> list[str]:
        """Return the streams that have a snapshot."""
        folders = self._streams.iterdir() if self._streams.is_dir() else ()
        return sorted(unquote(path.name) for path in folders if path.name[0] != "." and any(_snapshots(path)))

    def names(self, stream_id: str) -> list[SnapshotName]:
        """Return the names of a stream's snapshots, newest first."""
        return sorted(_snapshots(self._place(stream_id)), reverse=True)

    def write(self, stream_id: str, snapshot: StreamSnapshot) -> None:
        """Write a snapshot durably, then remove the oldest ones beyond the number to keep."""
        manifest = {
            "stream": stream_id,
            "seq": snapshot.name.seq,
            "version": snapshot.name.version,
            "adapted": snapshot.adapted,
            "images": snapshot.images,
            "removed": list(snapshot.difference.removed),
        }
        place = self._place(stream_id)
        is_new = not place.exists()
        write_snapshot(place / str(snapshot.name), manifest, snapshot.difference.changed)
        if is_new:
            sync_folder(self._streams)
        same_kind = [name for name in self.names(stream_id) if name.kind == snapshot.name.kind]
        for name in same_kind[self._keep :]:
            remove_folder(place / str(name))

    def read(self, stream_id: str, name: SnapshotName) -> StreamSnapshot:
        """Read one snapshot and check every byte."""
        folder = self._place(stream_id) / str(name)
        manifest, tensors = read_snapshot(folder)
        if [manifest.get(key) for key in ("stream", "seq", "version")] != [stream_id, name.seq, name.version]:
            raise SnapshotError(f"{folder} is the snapshot of another stream or moment")
        difference = StateDifference(tensors, tuple(manifest["removed"]))
        return StreamSnapshot(name, difference, manifest["adapted"], manifest["images"])

    def counts(self, stream_id: str) -> tuple[int, int]:
        """Return the numbers of adapted batches and images of the newest snapshot, without reading its tensors."""
        for name in self.names(stream_id):
            with suppress(SnapshotError, OSError, KeyError):
                manifest = read_manifest(self._place(stream_id) / str(name))
                return int(manifest["adapted"]), int(manifest["images"])
        return 0, 0

    def newest(self, stream_id: str, before: int | None = None) -> tuple[StreamSnapshot | None, list[str]]:
        """Return the newest valid snapshot (of a version below `before`), and what was wrong with newer ones."""
        problems: list[str] = []
        for name in self.names(stream_id):
            if before is None or name.version < before:
                try:
                    return self.read(stream_id, name), problems
                except (SnapshotError, OSError) as error:
                    problems.append(str(error))
        return None, problems

    def delete(self, stream_id: str) -> None:
        """Remove a stream with all its snapshots."""
        place = self._place(stream_id)
        if place.exists():
            remove_folder(place)

    def close(self) -> None:
        """Release the lock, so that another server can use the folder."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _place(self, stream_id: str) -> Path:
        """Return a stream's folder; upper-case letters are escaped, because some file systems ignore case."""
        return self._streams / "".join(f"%{ord(c):02x}" if c.isupper() else c for c in stream_id)


def _snapshots(folder: Path) -> Iterator[SnapshotName]:
    for path in folder.iterdir() if folder.is_dir() else ():
        match = _NAME.fullmatch(path.name)
        if match:
            yield SnapshotName(int(match[1]), int(match[2]), match[3])
