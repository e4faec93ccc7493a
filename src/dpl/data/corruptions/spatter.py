"""Spatter: drops of water or mud on the lens."""

from typing import cast

import numpy as np
from numpy.typing import NDArray

from dpl.core.extras import optional
from dpl.data.corruptions.arrays import Floats, Images, Rngs, draw, filter_axes, gaussian_weights

__all__ = ["edges", "spatter"]

_WATER = np.array([175, 238, 238], dtype=np.float32)  # pale turquoise
_MUD = np.array([63, 42, 20], dtype=np.float32)
_EMBOSS = np.array([[-2, -1, 0], [-1, 1, 1], [0, 1, 2]])
_WEAK, _STRONG = 50, 150  # thresholds of the edge detector
_TAN_22 = 2**0.5 - 1  # tangent of half of 45 degrees
_FAR = 20.0  # distances from an edge count up to this many pixels


def spatter(
    images: Images,
    rngs: Rngs,
    mean: float,
    spread: float,
    sigma: float,
    threshold: float,
    amount: float,
    mud: float,
) -> Floats:
    """Cover the image with blots where smoothed noise exceeds `threshold`: embossed water, or opaque mud."""
    shape = images.shape[1:3]
    liquid = mean + spread * draw(rngs, lambda rng: rng.standard_normal(shape, dtype=np.float32))
    liquid = _smooth(liquid, sigma)
    liquid[liquid < threshold] = 0
    if mud:
        cover = _smooth((liquid > threshold).astype(np.float32), amount)
        cover = np.where(cover < 0.8, 0, cover)[..., None]
        return images * (1 - cover) + cover * _MUD
    return images + _water(liquid, amount)[..., None] * _WATER


def _smooth(stack: Floats, sigma: float) -> Floats:
    return filter_axes(stack, gaussian_weights(sigma), "nearest")


def _water(liquid: Floats, amount: float) -> Floats:
    """Return how much light each pixel of the drops adds: bright rims on one side, as if lit from there."""
    ndimage = optional("scipy.ndimage", "bench")
    bytes_ = (np.minimum(liquid, 1) * 255).astype(np.uint8)
    near = np.minimum(np.stack([_distance(edge) for edge in edges(bytes_)]), _FAR)
    box = {"size": (1, 3, 3), "mode": "mirror"}
    level = np.floor(ndimage.uniform_filter(near, **box) + 1e-6).astype(np.uint8)
    level = np.stack([_equalize(image) for image in level]).astype(float)
    relief = np.clip(ndimage.correlate(level, _EMBOSS[None], mode="mirror"), 0, 255)
    light = bytes_ * np.rint(ndimage.uniform_filter(relief, **box))
    brightest = light.max(axis=(1, 2), keepdims=True)
    return np.asarray(amount * light / np.maximum(brightest, 1), dtype=np.float32)


def _distance(edge: NDArray[np.bool_]) -> NDArray[np.float64]:
    """Return every pixel's distance from the nearest edge; far from everything if there is none."""
    if not edge.any():
        return np.full(edge.shape, _FAR)
    return np.asarray(optional("scipy.ndimage", "bench").distance_transform_edt(~edge))


def _equalize(image: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Spread the histogram over 0..255; an image of one level stays as it is."""
    counts = np.bincount(image.ravel(), minlength=256)
    lowest = counts[counts > 0][0]
    if lowest == image.size:
        return image
    levels = np.rint((counts.cumsum() - lowest) * (255 / (image.size - lowest)))
    return np.asarray(np.clip(levels, 0, 255), dtype=np.uint8)[image]


def edges(images: NDArray[np.uint8]) -> NDArray[np.bool_]:
    """Find edges in grey images [N, H, W] by Canny's method: ridges of the gradient, weak ones only beside strong."""
    ndimage = optional("scipy.ndimage", "bench")
    values = images.astype(np.int32)
    dy, dx = (_slope(values, along, across) for along, across in ((1, 2), (2, 1)))
    steepness = np.abs(dx) + np.abs(dy)
    ridge = _is_ridge(steepness, dx, dy) & (steepness > _WEAK)
    touching = np.zeros((3, 3, 3), dtype=int)
    touching[1] = 1  # pixels touch within an image, never across two images
    joined, _ = ndimage.label(ridge, structure=touching)
    return np.isin(joined, np.unique(joined[ridge & (steepness > _STRONG)]))


def _slope(values: NDArray[np.int32], along: int, across: int) -> NDArray[np.int32]:
    """Return Sobel's derivative along one axis, smoothed across the other."""
    ndimage = optional("scipy.ndimage", "bench")
    difference = ndimage.correlate1d(values, [-1, 0, 1], axis=along, mode="nearest")
    return cast(NDArray[np.int32], ndimage.correlate1d(difference, [1, 2, 1], axis=across, mode="nearest"))


def _is_ridge(steepness: NDArray[np.int32], dx: NDArray[np.int32], dy: NDArray[np.int32]) -> NDArray[np.bool_]:
    """Return where the gradient is at its maximum, compared with the two neighbours in its own direction."""
    height, width = steepness.shape[1:]
    padded = np.pad(steepness, ((0, 0), (1, 1), (1, 1)))

    def beside(down: int, right: int) -> NDArray[np.int32]:
        return padded[:, 1 + down : 1 + down + height, 1 + right : 1 + right + width]

    across = (steepness > beside(0, -1)) & (steepness >= beside(0, 1))
    upright = (steepness > beside(-1, 0)) & (steepness >= beside(1, 0))
    falling = (steepness > beside(-1, -1)) & (steepness > beside(1, 1))
    rising = (steepness > beside(-1, 1)) & (steepness > beside(1, -1))
    diagonal = np.where((dx < 0) ^ (dy < 0), rising, falling)
    flat, steep = np.abs(dy) < _TAN_22 * np.abs(dx), np.abs(dx) < _TAN_22 * np.abs(dy)
    return np.where(flat, across, np.where(steep, upright, diagonal))
