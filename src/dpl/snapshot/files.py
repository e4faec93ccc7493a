"""One durable snapshot, and a folder of numbered ones in which the newest valid one is found after any crash.

A snapshot is a folder with the tensors (safetensors) and a manifest that holds the checksums. A reader finds a complete
one or none (`core.files.write_folder`). Every byte is checked, and no file can run code.

store/00000007/            a complete snapshot
store/.00000008.x1y2.tmp   a draft, or what a killed writer left of one: removed when the store is opened
store/.lock                locked while a snapshot is written or drafts are removed; the lock ends with its process
"""

import hashlib
import json
import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError
from safetensors.torch import load as parse_tensors
from safetensors.torch import save as serialise_tensors
from torch import Tensor

import dpl
from dpl.core.errors import SnapshotCorrupt, SnapshotError
from dpl.core.files import clear_drafts, lock, remove_folder, write_folder
from dpl.core.settings import whole_number

__all__ = ["Savable", "SnapshotStore", "read_manifest", "read_snapshot", "write_snapshot"]

FORMAT = 2
_MANIFEST = "manifest.json"
_TENSORS = "state.safetensors"
_LOCK = ".lock"


def write_snapshot(folder: Path, manifest: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Path:
    """Write a snapshot to `folder`, replacing an older one there only once the new one is complete."""
    folder = folder.resolve()
    if folder.exists() and not (folder / _MANIFEST).exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise SnapshotError(f"{folder} exists and is not a snapshot; choose another folder")
    data = serialise_tensors({key: value.detach().cpu().contiguous() for key, value in tensors.items()})
    record = {
        "format": FORMAT,
        "dpl": dpl.__version__,
        **manifest,
        "torch": torch.__version__,
        "files": {_TENSORS: {"sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data)}},
    }
    record["manifest_sha256"] = _digest(record)
    return write_folder(folder, {_TENSORS: data, _MANIFEST: _dump(record)})


def read_manifest(folder: Path) -> dict[str, Any]:
    """Read the manifest of a snapshot without its tensors."""
    path = _complete(folder) / _MANIFEST
    data = path.read_bytes()
    try:
        manifest = json.loads(data)
        unchanged = data == _dump(manifest)  # the same JSON in other bytes is damage, too
        expected = manifest.pop("manifest_sha256")
        entry = manifest["files"][_TENSORS]
        if not unchanged or not isinstance(entry["bytes"], int) or expected != _digest(manifest):
            raise ValueError("the checksum differs")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise SnapshotCorrupt(f"{path}: not the JSON manifest of a snapshot ({error}); use an older one") from error
    if manifest.get("format") != FORMAT:
        writer = manifest.get("dpl", "0.1")  # format 1 did not name it
        raise SnapshotError(
            f"{path}: snapshot format {manifest.get('format')!r}, this version of dpl reads {FORMAT}; "
            f"dpl {writer} wrote it and can read it"
        )
    return manifest  # type: ignore[no-any-return]


def read_snapshot(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Read a snapshot, checking every byte against its manifest."""
    folder = _complete(folder)
    manifest = read_manifest(folder)
    path, written = folder / _TENSORS, manifest["files"][_TENSORS]
    data = path.read_bytes() if path.is_file() else b""
    if len(data) != written["bytes"]:
        raise SnapshotCorrupt(f"{path}: {len(data)} bytes, but {written['bytes']} were written; use an older snapshot")
    if hashlib.sha256(data).hexdigest() != written["sha256"]:
        raise SnapshotCorrupt(f"{path}: the checksum differs from that of the bytes written; use an older snapshot")
    try:
        return manifest, parse_tensors(data)
    except SafetensorError as error:
        raise SnapshotCorrupt(f"{path}: not a safetensors file ({error})") from error


def _complete(folder: Path) -> Path:
    """Return the folder, or its predecessor if a writer was killed between two renames."""
    folder = folder.resolve()
    for place in (folder, folder.with_name(f".{folder.name}.previous")):
        if (place / _MANIFEST).is_file():
            return place
    raise SnapshotError(f"{folder} is not a snapshot: it has no {_MANIFEST}")


def _dump(record: Mapping[str, Any]) -> bytes:
    return json.dumps(record, indent=2).encode()


def _digest(record: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()


class Savable(Protocol):
    """An `AdaptiveModel`, or any other object that writes one snapshot folder."""

    def save(self, folder: str | Path, notes: Mapping[str, Any] | None = None) -> Path:
        """Write a durable snapshot to `folder`."""


class SnapshotStore:
    """The last `keep` snapshots of one model, in one folder; `dpl.load(store, network)` takes the newest valid one."""

    def __init__(self, folder: str | Path, keep: int = 3) -> None:
        self.folder, self.keep = Path(folder).resolve(), whole_number("keep", keep, least=1)
        if self.folder.exists() and not self.folder.is_dir():
            raise SnapshotError(f"{self.folder} is a file; a store of snapshots needs a folder")
        if self.folder.is_dir() and os.access(self.folder, os.W_OK):
            with lock(self.folder / _LOCK, wait=False) as alone:
                if alone:  # nobody is writing at this moment
                    clear_drafts(self.folder)

    def save(self, model: Savable, notes: Mapping[str, Any] | None = None) -> Path:
        """Write the next snapshot, which then survives any crash; remove all but the last `keep`; return its folder."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with lock(self.folder / _LOCK):
            numbers = [int(path.name) for path in self.all()]
            path = model.save(self.folder / f"{max(numbers, default=0) + 1:08d}", notes)
            for old in self.all()[: -self.keep]:
                remove_folder(old)
        return path

    def all(self) -> list[Path]:
        """Return the folders of all finished snapshots, oldest first; their bytes are not checked."""
        if not self.folder.is_dir():
            return []
        found = [path for path in self.folder.iterdir() if path.name.isdecimal() and path.is_dir()]
        return sorted(found, key=lambda path: int(path.name))

    def newest(self) -> Path | None:
        """Return the newest undamaged snapshot, with a warning for each damaged one; None if nothing was ever saved."""
        return self.read()[0] if self.all() else None

    def read(self) -> tuple[Path, dict[str, Any], dict[str, Tensor]]:
        """Read the newest valid snapshot; return its folder, manifest and tensors."""
        refused = []
        for path in reversed(self.all()):
            try:
                return path, *read_snapshot(path)
            except SnapshotError as error:
                refused.append(str(error))
                warnings.warn(f"snapshot refused, trying the one before: {error}", RuntimeWarning, stacklevel=2)
        if refused:
            raise SnapshotCorrupt(f"{self.folder}: no snapshot can be read: {'; '.join(refused)}")
        raise SnapshotError(f"{self.folder} has no snapshot yet; save one first")
