"""Frost textures, computed: needles of ice in many directions, grown where a cloud map lets them.

The benchmark overlays five photographs. None is shipped here, so five fixed textures take their place; an image gets a
random crop of a random one. They are meant to look like frost on a pane: dark clear patches, pale blue haze, and bright
needles that meet at angles of 60 degrees, as ice crystals do. Their contrast and scale were chosen so that networks err
about as often as they do on the published images.
"""

from functools import lru_cache

import numpy as np
from PIL import Image

from dpl.data.corruptions.arrays import Floats, Images, Rngs, to_bytes
from dpl.data.corruptions.plasma import plasma

__all__ = ["frost_crops", "frost_texture"]

_TEXTURES = 5
_SIDE = 512
_NEEDLES = ((0.5, 160), (0.3, 70), (0.2, 25))  # weight and length in pixels
_DIRECTIONS = (0, 12, 60, 72, 120, 132)  # degrees
_HAZE, _CONTRAST = 0.2, 5.0
_COLOUR = np.array([0.86, 0.95, 1.0], dtype=np.float32)  # ice scatters blue a little more


def frost_crops(rngs: Rngs, height: int, width: int, scale: float) -> Floats:
    """Return a random crop [N, H, W, 3], values 0..255, of a random texture magnified by `scale`."""
    crops = np.empty((len(rngs), height, width, 3), dtype=np.float32)
    for crop, rng in zip(crops, rngs, strict=True):
        texture = frost_texture(int(rng.integers(_TEXTURES)), scale)
        top, left = rng.integers(0, len(texture), size=2)
        rows, columns = (top + np.arange(height)) % len(texture), (left + np.arange(width)) % len(texture)
        crop[:] = texture[np.ix_(rows, columns)]  # the texture is a torus: a crop may run over its border
    return crops


@lru_cache(maxsize=4 * _TEXTURES)
def frost_texture(number: int, scale: float = 1) -> Images:
    """Return one of the five textures [S, S, 3], magnified by `scale`; it continues seamlessly over its borders."""
    if scale != 1:
        side, rim = round(_SIDE * scale), 4
        wrapped = np.pad(frost_texture(number), ((rim, rim), (rim, rim), (0, 0)), mode="wrap")  # no seam at the border
        method = Image.Resampling.BOX if scale < 1 else Image.Resampling.BILINEAR
        inner = (rim, rim, rim + _SIDE, rim + _SIDE)
        return np.asarray(Image.fromarray(wrapped).resize((side, side), method, box=inner))
    rng = np.random.default_rng([number, 0xF2057])
    cover = np.clip(2 * plasma([rng], _SIDE, 1.7)[0] - 0.5, 0, 1)
    needles = sum(weight * _needles(rng, length) for weight, length in _NEEDLES)
    light = 0.45 + _HAZE * cover + _CONTRAST * (0.5 + 0.5 * cover) * (needles - 0.5)
    return to_bytes(255 * np.clip(light, 0, 1)[..., None] * _COLOUR)


def _needles(rng: np.random.Generator, length: float) -> Floats:
    """Return a map 0..1 of bright lines about `length` pixels long, in pairs of directions 60 degrees apart."""
    noise = np.fft.rfft2(rng.standard_normal((_SIDE, _SIDE)))
    fy, fx = np.fft.fftfreq(_SIDE)[:, None], np.fft.rfftfreq(_SIDE)[None]
    start = rng.uniform(0, np.pi)
    best = np.full((_SIDE, _SIDE), -np.inf)
    for angle in start + np.deg2rad(_DIRECTIONS):
        along, across = fx * np.cos(angle) + fy * np.sin(angle), fy * np.cos(angle) - fx * np.sin(angle)
        gain = np.exp(-2 * np.pi**2 * ((along * length / 3) ** 2 + (across * length / 30) ** 2))
        lines = np.fft.irfft2(noise * gain, s=(_SIDE, _SIDE))
        best = np.maximum(best, lines / lines.std())
    return np.asarray((best - best.min()) / (best.max() - best.min()), dtype=np.float32)
