"""Blur: defocus, frosted glass, motion, zoom and plain Gaussian."""

import math
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from dpl.data.corruptions.arrays import (
    Floats,
    Images,
    Rngs,
    Weights,
    filter_axes,
    gaussian,
    planes,
    to_bytes,
    uniform,
    zoom,
)

__all__ = ["defocus_blur", "gaussian_blur", "glass_blur", "motion_blur", "smear", "zoom_blur"]


def gaussian_blur(images: Images, rngs: Rngs, sigma: float) -> Floats:
    """Blur with a Gaussian of standard deviation `sigma` pixels."""
    return gaussian(images, sigma)


def defocus_blur(images: Images, rngs: Rngs, radius: float, alias_blur: float) -> Floats:
    """Blur with a disc of `radius` pixels whose rim is softened by `alias_blur`: a lens out of focus."""
    stack = planes(images)
    total = np.zeros_like(stack)
    for share, weights in _separable_parts(radius, alias_blur):
        total += np.float32(share) * filter_axes(stack, weights, "mirror")
    return total.transpose(0, 2, 3, 1)


@lru_cache(maxsize=32)
def _separable_parts(radius: float, alias_blur: float) -> list[tuple[float, Weights]]:
    """Split the disc into separable parts: a symmetric kernel is the sum of its eigenvectors' outer products."""
    values, vectors = np.linalg.eigh(disc(radius, alias_blur))
    return [(float(values[i]), tuple(vectors[:, i].tolist())) for i in np.flatnonzero(np.abs(values) > 1e-6)]


def disc(radius: float, alias_blur: float) -> NDArray[np.float64]:
    """Return the defocus kernel: a disc smoothed by a 3- or 5-tap Gaussian, without rims that are zero.

    The smoothing mirrors the disc at the border of its grid, 8 pixels from the centre or `radius` if that is more. At
    8 and 10 pixels the disc touches the border and ends with a sum of 1.01 instead of 1, as in the published images.
    """
    reach = 8 if radius <= 8 else int(radius)
    line = np.arange(-reach, reach + 1)
    kernel = (line[:, None] ** 2 + line**2 <= radius**2).astype(float)
    taps = np.arange(-1, 2) if radius <= 8 else np.arange(-2, 3)
    weights = np.exp(-(taps**2) / (2 * alias_blur**2))
    kernel = filter_axes(kernel / kernel.sum(), tuple((weights / weights.sum()).tolist()), "mirror")
    used = kernel.max(axis=0) > 1e-9
    return np.asarray(kernel[np.ix_(used, used)])


def zoom_blur(images: Images, rngs: Rngs, stop: float, step: float) -> Floats:
    """Average the image with its magnifications 1, 1 + step, ... below `stop`: moving towards the object."""
    count, height, width, channels = images.shape
    lines = np.ascontiguousarray(images.transpose(1, 0, 3, 2), dtype=np.float32).reshape(height, -1, width)
    total = np.zeros((width, height, count * channels), dtype=np.float32)
    factors = np.arange(1, stop, step).tolist()
    for factor in factors:
        total += zoom(lines, factor)
    zoomed = total.reshape(width, height, count, channels).transpose(2, 1, 0, 3)
    return np.asarray((images + zoomed) / np.float32(len(factors) + 1), dtype=np.float32)


def motion_blur(images: Images, rngs: Rngs, radius: float, sigma: float) -> Floats:
    """Smear along a line at a random angle between -45 and 45 degrees: a moving camera."""
    angles = uniform(rngs, -45, 45, ())
    return smear(images.astype(np.float32), radius, sigma, angles) + 0.5  # this one rounds, the others cut off


def smear(images: Floats, radius: float, sigma: float, angles: Floats) -> Floats:
    """Average pixels [N, H, W, C] along a ray at `angles` [N] degrees, with half a Gaussian as weights, edges repeated.

    The weights and the rounding of the ray to whole pixels are those of ImageMagick's motion blur, which the
    benchmark's authors used.
    """
    height, width = images.shape[1:3]
    taps = np.arange(2 * math.ceil(radius) + 1)
    weights = np.exp(-(taps**2) / (2 * sigma**2))
    weights = (weights / weights.sum()).astype(np.float32)
    taps, weights = taps[weights > 1e-6], weights[weights > 1e-6]
    direction = np.deg2rad(angles.astype(float))[:, None]
    right = np.ceil(taps * np.cos(direction) - 0.5).astype(int)  # [N, taps]
    down = np.ceil(taps * np.sin(direction) - 0.5).astype(int)
    pad = len(taps)
    padded = np.pad(images, ((0, 0), (pad, pad), (pad, pad), (0, 0)), mode="edge")
    total = np.zeros_like(images)
    for n, image in enumerate(padded):
        for weight, x, y in zip(weights, right[n] + pad, down[n] + pad, strict=True):
            total[n] += weight * image[y : y + height, x : x + width]
    return total


def glass_blur(images: Images, rngs: Rngs, sigma: float, reach: float, rounds: float) -> Floats:
    """Blur, exchange pixels with near neighbours, blur again: frosted glass.

    As in the published images a pixel is overwritten by its neighbour and not swapped with it: the authors' line
    `x[a], x[b] = x[b], x[a]` works on numpy views, so the second half of the swap changes nothing.
    """
    count, height, width, channels = images.shape
    blurred = to_bytes(gaussian(images, sigma)).reshape(count, height * width, channels)
    source = np.broadcast_to(np.arange(height * width), (count, height * width))
    for _ in range(int(rounds)):
        source = np.take_along_axis(source, _shuffle(rngs, height, width, int(reach)), axis=1)
    shuffled = np.take_along_axis(blurred, source[..., None], axis=1)
    return gaussian(shuffled.reshape(images.shape), sigma)


def _shuffle(rngs: Rngs, height: int, width: int, reach: int) -> NDArray[np.intp]:
    """Return which pixel ends up at each place [N, H*W] after one pass of the overwriting, last pixel first.

    The pass is sequential: a place copies its neighbour, which may itself have been overwritten already. So each
    place points to the neighbour's new value (if that is later in the image, hence was done earlier) or to its old
    one, and following the pointers, twice as far each time, resolves all chains without a loop over pixels.
    """
    pixels = height * width
    grid = np.arange(pixels).reshape(height, width)
    inner = np.zeros((height, width), dtype=bool)
    inner[reach + 1 : height - reach + 1, reach + 1 : width - reach + 1] = True
    place = grid[inner]  # the places that are overwritten
    shape = (2, len(place))
    steps = np.stack([rng.integers(-reach, reach, size=shape) for rng in rngs])
    neighbour = place + steps[:, 1] * width + steps[:, 0]
    is_new = inner.ravel()[neighbour] & (neighbour > place)
    # Entries 0..pixels-1 are new values, pixels..2*pixels-1 for old ones, which point to themselves.
    pointer = np.tile(np.concatenate([grid.ravel() + pixels, grid.ravel() + pixels]), (len(rngs), 1))
    pointer[:, place] = np.where(is_new, neighbour, neighbour + pixels)
    while (pointer[:, :pixels] < pixels).any():
        pointer = np.take_along_axis(pointer, pointer, axis=1)
    return pointer[:, :pixels] - pixels
