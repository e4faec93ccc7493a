"""A folder of numbered snapshots: the newest good one is found after any crash, old ones are cleared away.

folder/00000007/            a complete snapshot (dpl.snapshot.files)
folder/.00000008.x1y2.tmp   one being written, or left behind by a killed writer: cleared when the store is opened
folder/.lock                held while a snapshot is written or the folder is tidied; a killed process lets it go
"""

import os
import shutil
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from dpl.core.errors import SettingError, SnapshotCorrupt, SnapshotError
from dpl.snapshot.files import read_snapshot

__all__ = ["Savable", "SnapshotStore", "Stored"]

_LOCK = ".lock"
_DIGITS = 8


class Savable(Protocol):
    """What a store can keep: an `AdaptiveModel`, or anything that writes one snapshot folder."""

    def save(self, folder: str | Path, notes: Mapping[str, Any] | None = None) -> Path:
        """Write a durable snapshot to `folder`."""


class Stored(NamedTuple):
    """A snapshot that was read and found good."""

    path: Path
    manifest: dict[str, Any]
    tensors: dict[str, Tensor]


class SnapshotStore:
    """The last `keep` snapshots of one model, in one folder.

    `dpl.load(store, network)` brings the newest good one back.
    """

    def __init__(self, folder: str | Path, keep: int = 3) -> None:
        if not isinstance(keep, int) or keep < 1:
            raise SettingError(f"keep={keep!r}: expected a whole number of at least 1")
        self.folder, self.keep = Path(folder).resolve(), keep
        if self.folder.exists() and not self.folder.is_dir():
            raise SnapshotError(f"{self.folder} is a file; a store of snapshots needs a folder")
        if self.folder.is_dir():
            self._clear_leftovers()

    def save(self, model: Savable, notes: Mapping[str, Any] | None = None) -> Path:
        """Write the next snapshot, then clear away all but the last `keep`; return its folder.

        When this returns, the snapshot survives a crash of the process and of the machine.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        with self._locked():
            numbers = [int(path.name) for path in self.all()]
            path = model.save(self.folder / f"{max(numbers, default=0) + 1:0{_DIGITS}d}", notes)
            for old in self.all()[: -self.keep]:
                _remove(old)
        return path

    def all(self) -> list[Path]:
        """Return the folders of all finished snapshots, oldest first; their bytes are not checked."""
        if not self.folder.is_dir():
            return []
        numbered = [path for path in self.folder.iterdir() if path.name.isdecimal() and path.is_dir()]
        return sorted(numbered, key=lambda path: int(path.name))

    def newest(self) -> Path | None:
        """Return the newest snapshot whose every byte is as it was written; None if nothing was ever saved.

        A damaged one is refused by name, with a warning, and the one before it is taken.
        """
        return self.read().path if self.all() else None

    def read(self) -> Stored:
        """Read the newest good snapshot."""
        refused = []
        for path in reversed(self.all()):
            try:
                return Stored(path, *read_snapshot(path))
            except SnapshotError as error:
                refused.append(str(error))
                warnings.warn(f"snapshot refused, trying the one before: {error}", RuntimeWarning, stacklevel=2)
        if refused:
            raise SnapshotCorrupt(f"{self.folder}: every snapshot is damaged: {'; '.join(refused)}")
        raise SnapshotError(f"{self.folder} has no snapshot yet; save one first")

    def _clear_leftovers(self) -> None:
        """Remove what killed writers left, unless somebody is writing at this moment."""
        if not os.access(self.folder, os.W_OK):
            return
        with self._locked(wait=False) as alone:
            if alone:
                for path in self.folder.glob(".*.tmp"):
                    shutil.rmtree(path, ignore_errors=True)

    @contextmanager
    def _locked(self, wait: bool = True) -> Iterator[bool]:
        """Hold the folder's lock; yield False if it is taken and `wait` is off."""
        import fcntl  # only where snapshots are stored: the library itself also runs where this does not exist

        with (self.folder / _LOCK).open("wb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            except BlockingIOError:
                yield False
            else:
                yield True


def _remove(path: Path) -> None:
    """Delete a snapshot so that a crash on the way leaves a leftover, never half a snapshot."""
    doomed = path.with_name(f".{path.name}.old.tmp")
    path.rename(doomed)
    shutil.rmtree(doomed, ignore_errors=True)
