"""Durable snapshots: tensors as safetensors, a manifest with checksums, complete or invisible.

A snapshot is a folder. It is written under a temporary name beside its place, flushed to the disk, and renamed as the
last act; a reader therefore never meets half of one. When the folder exists already, the old snapshot stays until the
new one is complete.
"""

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as parse_tensors
from safetensors.torch import save as serialise_tensors
from torch import Tensor

from dpl.core.errors import SnapshotCorrupt, SnapshotError

__all__ = ["read_manifest", "read_snapshot", "write_snapshot"]

FORMAT = 1
_MANIFEST = "manifest.json"
_TENSORS = "state.safetensors"


def write_snapshot(folder: Path, manifest: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Path:
    """Write a snapshot to `folder`, replacing an older one there only once the new one is complete."""
    folder = folder.resolve()
    if folder.exists() and not (folder / _MANIFEST).exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise SnapshotError(f"{folder} exists and is not a snapshot; choose another folder")
    data = serialise_tensors({key: value.detach().cpu().contiguous() for key, value in tensors.items()})
    record = {
        "format": FORMAT,
        **manifest,
        "torch": torch.__version__,
        "files": {_TENSORS: {"sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data)}},
    }
    record["manifest_sha256"] = _digest(record)
    folder.parent.mkdir(parents=True, exist_ok=True)
    fresh = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", suffix=".tmp", dir=folder.parent))
    try:
        _write(fresh / _TENSORS, data)
        _write(fresh / _MANIFEST, _dump(record))
        _flush(fresh)
        _publish(fresh, folder)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    return folder


def read_manifest(folder: Path) -> dict[str, Any]:
    """Read a snapshot's manifest alone."""
    return _read_manifest(_whole(folder) / _MANIFEST)


def read_snapshot(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Read a snapshot, checking every byte against its manifest."""
    folder = _whole(folder)
    manifest = _read_manifest(folder / _MANIFEST)
    data = _read_checked(folder / _TENSORS, manifest["files"][_TENSORS])
    try:
        return manifest, parse_tensors(data)
    except SafetensorError as error:
        raise SnapshotCorrupt(f"{folder / _TENSORS}: not a safetensors file ({error})") from error


def _whole(folder: Path) -> Path:
    """Return the folder, or the one before it after a crash between two renames."""
    folder = folder.resolve()
    for place in (folder, folder.with_name(f".{folder.name}.previous")):
        if (place / _MANIFEST).is_file():
            return place
    raise SnapshotError(f"{folder} is not a snapshot: it has no {_MANIFEST}")


def _read_manifest(path: Path) -> dict[str, Any]:
    data = path.read_bytes()
    try:
        manifest = json.loads(data)
        unchanged = data == _dump(manifest)  # a change that means the same in JSON is a change all the same
        expected = manifest.pop("manifest_sha256")
        entry = manifest["files"][_TENSORS]
        if not unchanged or not isinstance(entry["bytes"], int) or expected != _digest(manifest):
            raise ValueError("its checksum differs")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise SnapshotCorrupt(f"{path}: not the JSON manifest of a snapshot ({error}); use an older one") from error
    if manifest.get("format") != FORMAT:
        raise SnapshotError(f"{path}: format {manifest.get('format')!r}, this version reads {FORMAT}")
    return manifest  # type: ignore[no-any-return]


def _read_checked(path: Path, entry: Mapping[str, Any]) -> bytes:
    data = path.read_bytes() if path.is_file() else b""
    if len(data) != entry["bytes"]:
        raise SnapshotCorrupt(f"{path}: {len(data)} bytes, {entry['bytes']} were written; use an older snapshot")
    if hashlib.sha256(data).hexdigest() != entry["sha256"]:
        raise SnapshotCorrupt(f"{path}: its checksum is not that of what was written; use an older snapshot")
    return data


def _dump(record: Mapping[str, Any]) -> bytes:
    return json.dumps(record, indent=2).encode()


def _digest(record: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()


def _write(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _flush(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _publish(fresh: Path, folder: Path) -> None:
    """Rename into place; the snapshot before stays readable until then."""
    previous = folder.with_name(f".{folder.name}.previous")
    if folder.exists():
        shutil.rmtree(previous, ignore_errors=True)
        folder.rename(previous)
    fresh.rename(folder)
    _flush(folder.parent)
    shutil.rmtree(previous, ignore_errors=True)
