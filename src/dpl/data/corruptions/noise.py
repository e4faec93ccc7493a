"""Noise: additive Gaussian, Poisson, impulses, and Gaussian noise in proportion to the pixel."""

import numpy as np

from dpl.data.corruptions.arrays import Floats, Images, Rngs, draw

__all__ = ["gaussian_noise", "impulse_noise", "shot_noise", "speckle_noise"]


def _normal(images: Images, rngs: Rngs) -> Floats:
    return draw(rngs, lambda rng: rng.standard_normal(images.shape[1:], dtype=np.float32))


def gaussian_noise(images: Images, rngs: Rngs, scale: float) -> Floats:
    """Add Gaussian noise of standard deviation `scale` (of the range 0..1): low light."""
    return images + np.float32(255 * scale) * _normal(images, rngs)


def speckle_noise(images: Images, rngs: Rngs, scale: float) -> Floats:
    """Add Gaussian noise whose standard deviation is `scale` times the pixel."""
    return images * (1 + np.float32(scale) * _normal(images, rngs))


def shot_noise(images: Images, rngs: Rngs, photons: float) -> Floats:
    """Replace each pixel by a Poisson count with `photons` at full brightness: the grain of discrete light."""
    rates = images * (photons / 255)
    counts = np.stack([rng.poisson(rate) for rng, rate in zip(rngs, rates, strict=True)])
    return (counts * (255 / photons)).astype(np.float32)


def impulse_noise(images: Images, rngs: Rngs, share: float) -> Floats:
    """Set a `share` of all colour values to 0 or 255, each with probability one half: defect pixels, bit errors."""
    # One draw decides both: below share/2 pepper, between share/2 and share salt.
    level = draw(rngs, lambda rng: rng.random(images.shape[1:], dtype=np.float32))
    noisy = np.where(level < share, np.where(level < share / 2, 0, 255), images)
    return noisy.astype(np.float32)
