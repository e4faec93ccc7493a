"""Streams on disk: a folder for each, in it a few snapshots; complete or invisible, checked when read.

    STATE/model.json                      the model, method and settings that the streams belong to
    STATE/streams/<stream>/<seq>-<version>-<kind>/   one snapshot

`seq` counts what was done with a stream, `version` is the `seq` at which the saved state came to be: a rollback saves
an old version under a new number. One server at a time may use a folder, or the parts of one divided server, each for
the streams that it owns: every stream has one writer. The locks end with their process.
"""

import fcntl
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from urllib.parse import unquote

from dpl.core.errors import SettingError, SnapshotError
from dpl.serve.delta import Delta
from dpl.serve.shard import WHOLE, Shard
from dpl.snapshot import read_manifest, read_snapshot, write_snapshot

__all__ = ["Kind", "Saved", "SavedName", "StreamStore"]

Kind = Literal["auto", "manual"]
_NAME = re.compile(r"(\d{12})-(\d{12})-(auto|manual)")


@dataclass(frozen=True, order=True)
class SavedName:
    """The name of a snapshot; sorts by age."""

    seq: int
    version: int
    kind: str

    def __str__(self) -> str:
        return f"{self.seq:012d}-{self.version:012d}-{self.kind}"


@dataclass(frozen=True)
class Saved:
    """A stream's state as a snapshot holds it."""

    name: SavedName
    delta: Delta
    adapted: int = 0
    images: int = 0


class StreamStore:
    """The folder in which all streams of one server live."""

    def __init__(self, folder: Path, identity: Mapping[str, Any], keep: int, shard: Shard = WHOLE) -> None:
        self.folder = folder.resolve()
        self._streams = self.folder / "streams"
        self._keep, self._shard = keep, shard
        self.folder.mkdir(parents=True, exist_ok=True)
        self._locks = _locked(self.folder, shard)
        try:
            self.problem = self._claim(json.loads(json.dumps(identity)))
        except SettingError:
            self.close()
            raise

    def _claim(self, identity: dict[str, Any]) -> str | None:
        """Mark the folder as this model's; a folder of another model is refused, one that is read-only reported."""
        mark = self.folder / "model.json"
        if mark.exists():
            self._compare(mark, identity)
        try:
            self._streams.mkdir(exist_ok=True)
            for leftover in self._leftovers():
                shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()
            if self._shard.index == 0 and not mark.exists():
                fresh = self.folder / ".model.json.tmp"
                fresh.write_text(json.dumps(identity, indent=2))
                fresh.replace(mark)
        except OSError as error:
            return f"{self.folder}: {error.strerror or error}"
        return None

    def _leftovers(self) -> Iterator[Path]:
        """Find what a crash left behind, but not what another part is just writing."""
        for path in self.folder.glob(".*.tmp"):
            name = path.name.removeprefix(".").removesuffix(".tmp")
            if self._shard.index == 0 if name == "model.json" else self._shard.owns(unquote(name)):
                yield path
        for path in self._streams.glob("*/.*.tmp"):
            if self._shard.owns(unquote(path.parent.name)):
                yield path

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
        """Return the streams of this part that have a snapshot."""
        folders = self._streams.iterdir() if self._streams.is_dir() else ()
        names = (unquote(path.name) for path in folders if path.is_dir() and any(_snapshots(path)))
        return sorted(filter(self._shard.owns, names))

    def names(self, stream_id: str) -> list[SavedName]:
        """Return a stream's snapshots, the newest first."""
        return sorted(_snapshots(self._place(stream_id)), reverse=True)

    def write(self, stream_id: str, saved: Saved) -> None:
        """Write a snapshot durably, then remove those that are too old."""
        manifest = {
            "stream": stream_id,
            "seq": saved.name.seq,
            "version": saved.name.version,
            "adapted": saved.adapted,
            "images": saved.images,
            "removed": list(saved.delta.removed),
        }
        place = self._place(stream_id)
        first = not place.exists()
        write_snapshot(place / str(saved.name), manifest, saved.delta.changed)
        if first:  # the stream's own folder must be on the disk as well
            _flush(self._streams)
        same_kind = [name for name in self.names(stream_id) if name.kind == saved.name.kind]
        for name in same_kind[self._keep :]:
            _remove(place / str(name), place / f".{name}.tmp")

    def read(self, stream_id: str, name: SavedName) -> Saved:
        """Read one snapshot, every byte checked."""
        manifest, tensors = read_snapshot(self._place(stream_id) / str(name))
        if (manifest.get("stream"), manifest.get("seq"), manifest.get("version")) != (
            stream_id,
            name.seq,
            name.version,
        ):
            raise SnapshotError(f"{self._place(stream_id) / str(name)} is the snapshot of another stream or moment")
        return Saved(name, Delta(tensors, tuple(manifest["removed"])), manifest["adapted"], manifest["images"])

    def counts(self, stream_id: str) -> tuple[int, int]:
        """Return how many batches and images the newest snapshot has seen, without reading its tensors."""
        for name in self.names(stream_id):
            with suppress(SnapshotError, OSError, KeyError):
                manifest = read_manifest(self._place(stream_id) / str(name))
                return int(manifest["adapted"]), int(manifest["images"])
        return 0, 0

    def newest(self, stream_id: str, before: int | None = None) -> tuple[Saved | None, list[str]]:
        """Return the newest good snapshot (of a version below `before`), and what was wrong with newer ones."""
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
            _remove(place, self.folder / f".{place.name}.tmp")

    def close(self) -> None:
        """Let another server use the folder."""
        for lock in self._locks:
            with suppress(OSError):
                os.close(lock)
        self._locks = ()

    def _place(self, stream_id: str) -> Path:
        """Upper-case letters are spelt out: some file systems do not tell `Cam` from `cam`."""
        return self._streams / "".join(f"%{ord(c):02x}" if c.isupper() else c for c in stream_id)


def _snapshots(folder: Path) -> Iterator[SavedName]:
    for path in folder.iterdir() if folder.is_dir() else ():
        match = _NAME.fullmatch(path.name)
        if match:
            yield SavedName(int(match[1]), int(match[2]), match[3])


def _remove(path: Path, doomed: Path) -> None:
    """Rename first, so that a crash on the way leaves a leftover and never half of something."""
    shutil.rmtree(doomed, ignore_errors=True)
    path.rename(doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def _flush(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _locked(folder: Path, shard: Shard) -> tuple[int, ...]:
    """Lock the folder for one server; the parts of a divided one share it, and each has a lock of its own."""
    if shard.count == 1:
        return (_lock(folder, folder, fcntl.LOCK_EX),)
    shared = _lock(folder, folder, fcntl.LOCK_SH)
    try:
        mine = folder / f"part-{shard.index}.lock"
        mine.touch()
        return shared, _lock(folder, mine, fcntl.LOCK_EX)
    except (SettingError, OSError):
        os.close(shared)
        raise


def _lock(folder: Path, path: Path, kind: int) -> int:
    handle = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(handle, kind | fcntl.LOCK_NB)
    except OSError as error:
        os.close(handle)
        raise SettingError(f"{folder} is in use by another server; choose another --state folder") from error
    return handle
