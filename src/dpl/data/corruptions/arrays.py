"""What the corruptions share: seeded draws, and filters and zooms along the two image axes.

A filter along an axis is linear, so for images of ordinary size it is a matrix, and a whole batch is two matrix
products. These run image by image inside numpy: an image's result does not depend on its neighbours in the batch.
"""

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpl.core.extras import optional

__all__ = [
    "Floats",
    "Images",
    "Rngs",
    "Weights",
    "draw",
    "filter_axes",
    "gaussian",
    "gaussian_weights",
    "planes",
    "to_bytes",
    "uniform",
    "zoom",
]

Images = NDArray[np.uint8]  # [N, H, W, 3]
Floats = NDArray[np.float32]
Rngs = Sequence[np.random.Generator]  # one per image
Weights = tuple[float, ...]  # of a filter along one axis, an odd number, the middle one for the pixel itself

_LARGEST_MATRIX = 512  # beyond, matrices cost more than the filter itself, in time and in memory


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


def gaussian(images: Images, sigma: float) -> Floats:
    """Blur images [N, H, W, 3] with a Gaussian, edges repeated; the result stays in 0..255."""
    return filter_axes(planes(images), gaussian_weights(sigma), "nearest").transpose(0, 2, 3, 1)


def gaussian_weights(sigma: float, truncate: float = 4.0) -> Weights:
    """Return the weights of a Gaussian filter, cut off at `truncate` standard deviations; sigma 0 changes nothing."""
    reach = int(truncate * sigma + 0.5)
    weights = np.exp(-(np.arange(-reach, reach + 1) ** 2) / (2 * max(sigma, 1e-9) ** 2))
    return tuple((weights / weights.sum()).tolist())


def filter_axes(stack: Floats, weights: Weights, mode: str) -> Floats:
    """Correlate a stack [..., H, W] with the same weights along height and width; `mode` is scipy's boundary rule."""
    if max(stack.shape[-2:]) > _LARGEST_MATRIX:
        correlate = optional("scipy.ndimage", "bench").correlate1d
        return np.asarray(correlate(correlate(stack, weights, -2, mode=mode), weights, -1, mode=mode))
    rows, columns = (_matrix(size, weights, mode) for size in stack.shape[-2:])
    product: Floats = np.matmul(np.matmul(rows, stack), columns.T)
    return product


@lru_cache(maxsize=128)
def _matrix(size: int, weights: Weights, mode: str) -> Floats:
    """Return a filter's matrix: filtering the unit vectors gives it, boundary rule included."""
    filtered = optional("scipy.ndimage", "bench").correlate1d(np.eye(size), weights, axis=0, mode=mode)
    return np.asarray(filtered, dtype=np.float32)


def zoom(stack: Floats, factor: float) -> Floats:
    """Magnify the middle of [H, M, W] by `factor` along both outer axes, sizes kept; returns it turned, [W, H, M]."""
    height, many, width = stack.shape
    tall = (_zoom_matrix(height, factor) @ stack.reshape(height, -1)).reshape(height * many, width)
    wide = _zoom_matrix(width, factor) @ np.ascontiguousarray(tall.T)
    return np.asarray(wide).reshape(width, height, many)


@lru_cache(maxsize=256)
def _zoom_matrix(size: int, factor: float) -> Any:
    """Return the sparse matrix of a zoom along an axis by linear interpolation: two entries a row."""
    crop = math.ceil(size / factor)
    zoomed = round(crop * factor)
    start, trim = (size - crop) // 2, (zoomed - size) // 2
    position = (np.arange(size) + trim) * (crop - 1) / max(zoomed - 1, 1)
    left = np.minimum(np.floor(position).astype(int), max(crop - 2, 0))
    share = (position - left).astype(np.float32)
    columns = start + np.stack([left, np.minimum(left + 1, crop - 1)], axis=1)
    entries = np.stack([1 - share, share], axis=1)
    row_ends = np.arange(0, 2 * size + 1, 2)
    return optional("scipy.sparse", "bench").csr_array((entries.ravel(), columns.ravel(), row_ends), (size, size))
