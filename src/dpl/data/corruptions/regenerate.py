"""Corruption benchmarks generated from clean images and stored as `.npy` files in a cache folder.

Results on them are called regenerated: the constants are the published ones, the random draws are not.
"""

import hashlib
import io
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from dpl.core.files import write_file
from dpl.data.corruptions import corrupt
from dpl.data.corruptions.apply import is_small
from dpl.data.sets import Arrays, ImageSet
from dpl.data.transforms import Transform

__all__ = ["corrupted_pixels", "regenerated"]

_FORMAT = 1
_JPEG_QUALITY = 85  # as ImageNet-C was stored

Pixels = NDArray[np.uint8]
Positions = NDArray[np.int64]


def regenerated(
    clean: ImageSet, positions: Positions, transform: Transform, name: str, severity: int, *, seed: int, cache: Path
) -> ImageSet:
    """Return the images at `positions` of a clean set under one corruption.

    The random draws of an image depend only on the seed, the corruption and its position in the whole clean set.
    """
    chosen = clean.subset(positions)
    path = cache / "regenerated" / f"{_key(chosen, positions, transform, name, severity, seed)}.npy"
    if not path.exists():
        rows = [
            corrupted_pixels(chosen, row, int(place), transform, name, severity, seed)
            for row, place in enumerate(positions)
        ]
        buffer = io.BytesIO()  # numpy writes to a file without saying that the disk is full
        np.save(buffer, np.stack(rows), allow_pickle=False)
        write_file(path, buffer.getvalue())
    pixels = np.load(path, mmap_mode="r", allow_pickle=False)
    title = f"{clean.name} regenerated/{name}/{severity}"
    return ImageSet(title, clean.classes, chosen.labels, Arrays(pixels, origin=title))


def corrupted_pixels(
    chosen: ImageSet, row: int, place: int, transform: Transform, name: str, severity: int, seed: int
) -> Pixels:
    """Return one image under a corruption; `place` is its position in the whole clean set."""
    pixels = transform.pixels(chosen.load(row))
    result = corrupt(pixels[None], name, severity, seed=seed, start=place)[0]
    return result if is_small(result) else _stored_as_jpeg(result)


def _stored_as_jpeg(pixels: Pixels) -> Pixels:
    """Return the pixels after the compression with which large corrupted images are published."""
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, format="JPEG", quality=_JPEG_QUALITY)
    return np.array(Image.open(buffer).convert("RGB"), dtype=np.uint8)


def _key(chosen: ImageSet, positions: Positions, transform: Transform, name: str, severity: int, seed: int) -> str:
    digest = hashlib.sha256(f"{_FORMAT} {transform!r} {name} {severity} {seed}".encode())
    digest.update(positions.astype("<i8").tobytes())
    for part in chosen.source.identity():
        digest.update(part)
    return digest.hexdigest()[:32]
