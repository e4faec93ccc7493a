"""A cache of decoded images on disk: one 8-bit `.npy` per (set, transform), mapped into memory when it is used again.

The file name is a hash of the images and the transform, so that a change of either gives another file. A `.json` file
beside it is written last. It contains the size and the checksum of a complete file; if they differ, it is made again.
"""

import hashlib
import json
import time
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np

from dpl.core.errors import DataError
from dpl.core.files import replacing, write_file
from dpl.data.sets import Arrays, DataWarning, ImageSet
from dpl.data.transforms import Evaluation, Pixels

__all__ = ["cached", "sizes_differ"]

_FORMAT = 1
_CHUNK = 1 << 22
_STALE_SECONDS = 24 * 3600

Row = Pixels | DataError


def cached(
    image_set: ImageSet, transform: Evaluation, folder: Path, rows: Callable[[], Iterator[Row]]
) -> ImageSet | None:
    """Return the set with its transformed pixels from the cache, which is written first if it does not exist.

    `rows` yields the pixels of every image of the set in order, or the error if it cannot be read. If the folder cannot
    be written to, the function warns and returns None: the caller then continues without a cache.
    """
    path = folder / f"{_key(image_set, transform)}.npy"
    failed = _failures_if_sound(path)
    if failed is None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            failed = _write(path, image_set, transform, rows())
        except OSError as error:
            text = f"cache={folder}: cannot be written ({error.strerror or error}); continuing without a cache"
            warnings.warn(text, DataWarning, stacklevel=2)
            return None
    pixels = np.load(path, mmap_mode="r", allow_pickle=False)
    names = tuple(image_set.location(index) for index in range(len(image_set)))
    source = Arrays(pixels, origin=str(path), names=names, failed=failed)
    return ImageSet(image_set.name, image_set.classes, image_set.labels, source)


def _key(image_set: ImageSet, transform: Evaluation) -> str:
    digest = hashlib.sha256(f"{_FORMAT} {transform!r}".encode())
    for part in image_set.source.identity():
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()[:32]


def _failures_if_sound(path: Path) -> dict[int, str] | None:
    """Return which rows could not be read when the cache was made, or None if it is absent or damaged."""
    mark = path.with_suffix(".json")
    try:
        noted = json.loads(mark.read_text(encoding="utf-8"))
        failed = {int(row): str(reason) for row, reason in noted["failed"].items()}
        with path.open("rb") as stream:
            sound = path.stat().st_size == noted["bytes"] and _checksum(stream, failed) == noted["checksum"]
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        sound = False
    if sound:
        return failed
    warnings.warn(f"{path}: the cached images are damaged and are decoded again", DataWarning, stacklevel=3)
    return None


def _checksum(stream: BinaryIO, failed: dict[int, str]) -> int:
    """Return the CRC-32 of file and failures: it detects accidents in a third of the time of a strong hash."""
    value = zlib.crc32(json.dumps(failed).encode())
    while chunk := stream.read(_CHUNK):
        value = zlib.crc32(chunk, value)
    return value


def _write(path: Path, image_set: ImageSet, transform: Evaluation, rows: Iterable[Row]) -> dict[int, str]:
    """Write the pixels, then the mark; an interrupted run leaves no file that would be used."""
    _remove_stale(path)
    with replacing(path) as draft:
        with draft.open("wb") as stream:
            failed = _write_rows(stream, image_set, rows)
        with draft.open("rb") as stream:
            noted = {"set": image_set.name, "transform": repr(transform), "bytes": draft.stat().st_size}
            noted |= {"checksum": _checksum(stream, failed), "failed": failed}
    write_file(path.with_suffix(".json"), json.dumps(noted))
    return failed


def _write_rows(stream: BinaryIO, image_set: ImageSet, rows: Iterable[Row]) -> dict[int, str]:
    """Write the header once the first image gives the size, and zeros for images that cannot be read.

    The file is written, not memory-mapped: a full disk then raises an error instead of ending the process.
    """
    failed: dict[int, str] = {}
    shape: tuple[int, ...] | None = None
    for index, row in enumerate(rows):
        if isinstance(row, DataError):
            failed[index] = str(row).removeprefix(f"{image_set.location(index)}: ")
        elif shape is None:
            shape = row.shape
            header = {"descr": "|u1", "fortran_order": False, "shape": (len(image_set), *shape)}
            np.lib.format.write_array_header_1_0(stream, header)
            stream.write(bytes(len(failed) * row.size))
        elif row.shape != shape:
            raise sizes_differ(image_set.location(index), row.shape, shape)
        if shape is not None:
            stream.write(bytes(int(np.prod(shape))) if isinstance(row, DataError) else row.tobytes())
    if shape is None:
        raise DataError(f"{image_set.name}: none of its {len(image_set)} images can be read; the first: {failed[0]}")
    return failed


def sizes_differ(location: str, found: tuple[int, ...], expected: tuple[int, ...]) -> DataError:
    """Return the error for an image whose size is not that of the images before it."""
    return DataError(
        f"{location}: {found[1]} x {found[0]} pixels after the transform, {expected[1]} x {expected[0]} before it; "
        "images of one batch need one size: use square(size) or resize_crop(resize, crop)"
    )


def _remove_stale(path: Path) -> None:
    """Remove drafts of this file that a killed process left at least a day ago."""
    for draft in path.parent.glob(f".{path.stem}.*.tmp"):
        try:
            if time.time() - draft.stat().st_mtime > _STALE_SECONDS:
                draft.unlink()
        except OSError:
            continue  # removed by another process
