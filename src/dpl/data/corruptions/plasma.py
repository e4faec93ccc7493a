"""Plasma fractal: cloud maps by the diamond-square algorithm, for a whole batch at once."""

import numpy as np

from dpl.data.corruptions.arrays import Floats, Rngs, uniform

__all__ = ["plasma"]


def plasma(rngs: Rngs, side: int, decay: float) -> Floats:
    """Return cloud maps [N, S, S] between 0 and 1, S being the power of two from `side` upwards.

    Every point is the mean of four neighbours plus noise; the noise shrinks by `decay` squared whenever the spacing
    halves. The map is a torus, hence the rolls.
    """
    size = 1 << max(side - 1, 1).bit_length()
    noise = uniform(rngs, -1, 1, (size, size))  # every point but the first is filled once and takes its own number
    clouds = np.zeros_like(noise)
    step, amplitude = size, 100.0**2
    while step >= 2:
        _fill(clouds, noise * np.float32(amplitude), step)
        step, amplitude = step // 2, amplitude / decay**2
    clouds -= clouds.min(axis=(1, 2), keepdims=True)
    clouds /= clouds.max(axis=(1, 2), keepdims=True)
    return clouds


def _fill(clouds: Floats, noise: Floats, step: int) -> None:
    """Fill the middles of all squares of side `step`, then the middles of their edges."""
    on, mid = slice(0, None, step), slice(step // 2, None, step)
    corner = clouds[:, on, on]
    below = corner + np.roll(corner, -1, axis=1)
    clouds[:, mid, mid] = (below + np.roll(below, -1, axis=2)) / 4 + noise[:, mid, mid]
    centre = clouds[:, mid, mid]
    beside = corner + np.roll(corner, -1, axis=2)
    clouds[:, on, mid] = (centre + np.roll(centre, 1, axis=1) + beside) / 4 + noise[:, on, mid]
    clouds[:, mid, on] = (centre + np.roll(centre, 1, axis=2) + below) / 4 + noise[:, mid, on]
