"""What the corruptions share: seeded draws and linear maps along the two image axes.

A blur or a zoom that treats rows and columns alike is a pair of matrices, so a whole batch is two matrix products.
The products run image by image inside numpy: an image's result does not depend on its neighbours in the batch.
"""

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from dpl.extras import optional

__all__ = [
    "Floats",
    "Images",
    "Rngs",
    "draw",
    "filter_matrix",
    "gaussian",
    "gaussian_matrix",
    "planes",
    "separable",
    "to_bytes",
    "uniform",
    "zoom_matrix",
]

Images = NDArray[np.uint8]  # [N, H, W, 3]
Floats = NDArray[np.float32]
Rngs = Sequence[np.random.Generator]  # one per image


def draw(rngs: Rngs, sample: Callable[[np.random.Generator], Any]) -> Floats:
    """Return one sample per image, stacked: each from that image's own generator."""
    return np.stack([np.asarray(sample(rng), dtype=np.float32) for rng in rngs])


def uniform(rngs: Rngs, low: float, high: float, shape: tuple[int, ...]) -> Floats:
    """Draw uniform numbers [N, *shape] between `low` and `high`."""
    return low + (high - low) * draw(rngs, lambda rng: rng.random(shape, dtype=np.float32))


def planes(images: Images) -> Floats:
    """Return the images as float colour planes [N, 3, H, W], the layout that matrix products want."""
    return np.ascontiguousarray(images.transpose(0, 3, 1, 2), dtype=np.float32)


def to_bytes(values: Floats) -> Images:
    """Clip to 0..255 and cut off the fraction, as the benchmark does; a rounding error below a whole number is none."""
    bounded: Floats = np.clip(values + np.float32(1e-3), 0, 255)
    return bounded.astype(np.uint8)


def separable(stack: Floats, rows: Floats, columns: Floats) -> Floats:
    """Apply one matrix along the height and one along the width of a stack [..., H, W]."""
    result: Floats = np.matmul(np.matmul(rows, stack), columns.T)
    return result


def gaussian(images: Images, sigma: float) -> Floats:
    """Blur images [N, H, W, 3] with a Gaussian, edges repeated; the result stays in 0..255."""
    height, width = images.shape[1:3]
    blurred = separable(planes(images), gaussian_matrix(height, sigma), gaussian_matrix(width, sigma))
    return blurred.transpose(0, 2, 3, 1)


@lru_cache(maxsize=64)
def gaussian_matrix(size: int, sigma: float, mode: str = "nearest", truncate: float = 4.0) -> Floats:
    """Return the matrix of a Gaussian filter along an axis of `size` pixels."""
    if sigma == 0:
        return np.eye(size, dtype=np.float32)
    ndimage = optional("scipy.ndimage", "bench")
    # A filter is linear, so filtering the unit vectors gives its matrix, boundary rule included.
    matrix = ndimage.gaussian_filter1d(np.eye(size), sigma, axis=0, mode=mode, truncate=truncate)
    return cast(Floats, matrix.astype(np.float32))


def filter_matrix(size: int, weights: NDArray[np.float64]) -> Floats:
    """Return the matrix of a correlation with `weights`; beyond the edge the image is mirrored about its last pixel."""
    ndimage = optional("scipy.ndimage", "bench")
    return cast(Floats, ndimage.correlate1d(np.eye(size), weights, axis=0, mode="mirror").astype(np.float32))


@lru_cache(maxsize=256)
def zoom_matrix(size: int, factor: float) -> Floats:
    """Return the matrix that magnifies the middle of an axis by `factor`, linearly interpolated, to the same size."""
    crop = math.ceil(size / factor)
    zoomed = round(crop * factor)
    start, trim = (size - crop) // 2, (zoomed - size) // 2
    position = (np.arange(size) + trim) * (crop - 1) / max(zoomed - 1, 1)
    left = np.minimum(np.floor(position).astype(int), max(crop - 2, 0))
    share = position - left
    matrix = np.zeros((size, size), dtype=np.float32)
    matrix[np.arange(size), start + left] += 1 - share
    matrix[np.arange(size), start + np.minimum(left + 1, crop - 1)] += share
    return matrix
