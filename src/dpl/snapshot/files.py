"""One durable snapshot: a folder with the tensors (safetensors) and a manifest that holds the checksums.

A reader finds a complete snapshot or none (`core.files.write_folder`). Every byte is checked, and no file can run code.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as parse_tensors
from safetensors.torch import save as serialise_tensors
from torch import Tensor

import dpl
from dpl.core.errors import SnapshotCorrupt, SnapshotError
from dpl.core.files import write_folder

__all__ = ["read_manifest", "read_snapshot", "write_snapshot"]

FORMAT = 2
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
        "dpl": dpl.__version__,
        **manifest,
        "torch": torch.__version__,
        "files": {_TENSORS: {"sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data)}},
    }
    record["manifest_sha256"] = _digest(record)
    return write_folder(folder, {_TENSORS: data, _MANIFEST: _dump(record)})


def read_manifest(folder: Path) -> dict[str, Any]:
    """Read the manifest of a snapshot without its tensors."""
    return _read_manifest(_complete(folder) / _MANIFEST)


def read_snapshot(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Read a snapshot, checking every byte against its manifest."""
    folder = _complete(folder)
    manifest = _read_manifest(folder / _MANIFEST)
    data = _read_checked(folder / _TENSORS, manifest["files"][_TENSORS])
    try:
        return manifest, parse_tensors(data)
    except SafetensorError as error:
        raise SnapshotCorrupt(f"{folder / _TENSORS}: not a safetensors file ({error})") from error


def _complete(folder: Path) -> Path:
    """Return the folder, or its predecessor if a writer was killed between two renames."""
    folder = folder.resolve()
    for place in (folder, folder.with_name(f".{folder.name}.previous")):
        if (place / _MANIFEST).is_file():
            return place
    raise SnapshotError(f"{folder} is not a snapshot: it has no {_MANIFEST}")


def _read_manifest(path: Path) -> dict[str, Any]:
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


def _read_checked(path: Path, entry: Mapping[str, Any]) -> bytes:
    data = path.read_bytes() if path.is_file() else b""
    if len(data) != entry["bytes"]:
        raise SnapshotCorrupt(f"{path}: {len(data)} bytes, but {entry['bytes']} were written; use an older snapshot")
    if hashlib.sha256(data).hexdigest() != entry["sha256"]:
        raise SnapshotCorrupt(f"{path}: the checksum differs from that of the bytes written; use an older snapshot")
    return data


def _dump(record: Mapping[str, Any]) -> bytes:
    return json.dumps(record, indent=2).encode()


def _digest(record: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()
