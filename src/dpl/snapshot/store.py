"""A folder of numbered snapshots: the newest valid one is found after any crash, and old ones are removed.

folder/00000007/            a complete snapshot (dpl.snapshot.files)
folder/.00000008.x1y2.tmp   a draft, or what a killed writer left of one: removed when the store is opened
folder/.lock                locked while a snapshot is written or drafts are removed; the lock ends with its process
"""

import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from dpl.core.errors import SettingError, SnapshotCorrupt, SnapshotError
from dpl.core.files import clear_drafts, lock, remove_folder
from dpl.snapshot.files import read_snapshot

__all__ = ["Savable", "SnapshotStore", "Stored"]

_LOCK = ".lock"
_DIGITS = 8


class Savable(Protocol):
    """An `AdaptiveModel`, or any other object that writes one snapshot folder."""

    def save(self, folder: str | Path, notes: Mapping[str, Any] | None = None) -> Path:
        """Write a durable snapshot to `folder`."""


class Stored(NamedTuple):
    """A snapshot whose bytes were read and checked."""

    path: Path
    manifest: dict[str, Any]
    tensors: dict[str, Tensor]


class SnapshotStore:
    """The last `keep` snapshots of one model, in one folder.

    `dpl.load(store, network)` restores the newest valid one.
    """

    def __init__(self, folder: str | Path, keep: int = 3) -> None:
        if not isinstance(keep, int) or keep < 1:
            raise SettingError(f"keep={keep!r}: expected a whole number of at least 1")
        self.folder, self.keep = Path(folder).resolve(), keep
        if self.folder.exists() and not self.folder.is_dir():
            raise SnapshotError(f"{self.folder} is a file; a store of snapshots needs a folder")
        if self.folder.is_dir() and os.access(self.folder, os.W_OK):
            with lock(self.folder / _LOCK, wait=False) as alone:
                if alone:  # nobody is writing at this moment
                    clear_drafts(self.folder)

    def save(self, model: Savable, notes: Mapping[str, Any] | None = None) -> Path:
        """Write the next snapshot, then remove all but the last `keep`; return its folder.

        After the return the snapshot survives a crash of the process and of the machine.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        with lock(self.folder / _LOCK):
            numbers = [int(path.name) for path in self.all()]
            path = model.save(self.folder / f"{max(numbers, default=0) + 1:0{_DIGITS}d}", notes)
            for old in self.all()[: -self.keep]:
                remove_folder(old)
        return path

    def all(self) -> list[Path]:
        """Return the folders of all finished snapshots, oldest first; their bytes are not checked."""
        if not self.folder.is_dir():
            return []
        numbered = [path for path in self.folder.iterdir() if path.name.isdecimal() and path.is_dir()]
        return sorted(numbered, key=lambda path: int(path.name))

    def newest(self) -> Path | None:
        """Return the newest snapshot whose bytes are unchanged; None if nothing was ever saved.

        A damaged snapshot is named in a warning, and the one before it is taken.
        """
        return self.read().path if self.all() else None

    def read(self) -> Stored:
        """Read the newest valid snapshot."""
        refused = []
        for path in reversed(self.all()):
            try:
                return Stored(path, *read_snapshot(path))
            except SnapshotError as error:
                refused.append(str(error))
                warnings.warn(f"snapshot refused, trying the one before: {error}", RuntimeWarning, stacklevel=2)
        if refused:
            raise SnapshotCorrupt(f"{self.folder}: no snapshot can be read: {'; '.join(refused)}")
        raise SnapshotError(f"{self.folder} has no snapshot yet; save one first")
