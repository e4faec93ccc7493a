"""Array files, read without ever running what they hold: `.npy`, `.npz` and CIFAR's binary records."""

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpl.core.errors import DataError

__all__ = ["read_cifar_records", "read_npy", "read_npz"]

_CIFAR_PIXELS = 3 * 32 * 32


def read_npy(path: Path) -> NDArray[Any]:
    """Map a `.npy` file into memory; one with Python objects inside is refused."""
    array = _load(path, "r")
    if not isinstance(array, np.ndarray):
        raise DataError(f"{path}: an archive; expected one array (.npy)")
    return array


def read_npz(path: Path) -> dict[str, NDArray[Any]]:
    """Read the arrays `images` and `labels`, and `classes` where present, of a `.npz` file."""
    archive = _load(path, None)
    if isinstance(archive, np.ndarray):
        raise DataError(f"{path}: one bare array; expected an archive (.npz) with 'images' and 'labels'")
    with archive:
        missing = [key for key in ("images", "labels") if key not in archive.files]
        if missing:
            raise DataError(f"{path}: holds {archive.files} but not {missing}; expected 'images' and 'labels'")
        try:
            return {key: archive[key] for key in ("images", "labels", "classes") if key in archive.files}
        except Exception as error:  # zip and array readers have many kinds of complaint
            raise DataError(f"{path}: {_reason(path, error)}") from error


def _load(path: Path, mmap_mode: Any) -> Any:
    try:
        return np.load(path, mmap_mode=mmap_mode, allow_pickle=False)
    except FileNotFoundError as error:
        raise DataError(f"{path}: no such file") from error
    except Exception as error:  # zip and array readers have many kinds of complaint
        raise DataError(f"{path}: {_reason(path, error)}") from error


def _reason(path: Path, error: Exception) -> str:
    with path.open("rb") as stream:
        if stream.read(64).lstrip().startswith(b"<"):
            return "an HTML page, not an array: the download failed; fetch the file again"
    return f"damaged, cut short or not a plain array ({error}); fetch the file again"


def read_cifar_records(path: Path, label_bytes: int) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Return pixels [N, 32, 32, 3] and labels of a binary CIFAR file; the last label byte of a record counts."""
    try:
        raw = np.fromfile(path, dtype=np.uint8)
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from error
    record = label_bytes + _CIFAR_PIXELS
    if raw.size == 0 or raw.size % record:
        raise DataError(f"{path}: {raw.size:,} bytes are not whole records of {record:,}; the file was cut short")
    records = raw.reshape(-1, record)
    planes = records[:, label_bytes:].reshape(-1, 3, 32, 32)
    return np.ascontiguousarray(planes.transpose(0, 2, 3, 1)), records[:, label_bytes - 1].astype(np.int64)
