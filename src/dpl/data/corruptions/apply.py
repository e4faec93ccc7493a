"""Corrupt a batch of images by the name of the corruption."""

import zlib
from collections.abc import Callable, Iterable
from typing import Any, Final

import numpy as np

from dpl.core.errors import InputError, SettingError, did_you_mean
from dpl.data.corruptions import blur, digital, noise, spatter, weather
from dpl.data.corruptions.arrays import Floats, Images, to_bytes
from dpl.data.corruptions.constants import CIFAR, IMAGENET, SEVERITIES
from dpl.data.facts import CORRUPTIONS, EXTRA_CORRUPTIONS

__all__ = ["STRENGTHS", "apply_strengths", "check_images", "check_settings", "corrupt", "is_small"]

_SMALL: Final = 64  # images up to this side take the 32-pixel strengths
_SMALLEST: Final = 8  # below, elastic corners and glass neighbourhoods have no room
_PIXELS_AT_ONCE: Final = 2**15  # what is worked on at once fits the processor's cache
STRENGTHS: Final = {"cifar": CIFAR, "imagenet": IMAGENET}

_FUNCTIONS: Final[dict[str, Callable[..., Floats]]] = {
    name: getattr(module, name)
    for module in (noise, blur, weather, digital, spatter)
    for name in (*CORRUPTIONS, *EXTRA_CORRUPTIONS)
    if hasattr(module, name)
}


def corrupt(
    images: Images, name: str, severity: int, *, seed: int = 0, start: int = 0, constants: str = "auto"
) -> Images:
    """Return the images with one corruption of the benchmark applied.

    Args:
        images: uint8 [N, H, W, 3], RGB, at least 8 pixels a side.
        name: one of `CORRUPTIONS` or `EXTRA_CORRUPTIONS`.
        severity: 1 to 5.
        seed: with the name, the severity and an image's number it decides all that is random about that image.
        start: number of the first image. Image `start + i` comes out the same whatever else is in the batch.
        constants: the published strengths for 32 pixels (`"cifar"`), for 224 (`"imagenet"`), or `"auto"`: the
            former for images of up to 64 pixels a side.

    """
    check_settings([name], [severity], seed=seed, start=start, constants=constants)
    check_images(images)
    if constants == "auto":
        constants = "cifar" if is_small(images) else "imagenet"
    return apply_strengths(images, name, STRENGTHS[constants][name][severity - 1], (seed, severity), start)


def apply_strengths(
    images: Images, name: str, strengths: tuple[float, ...], seeds: tuple[int, int], start: int
) -> Images:
    """Return the images with one corruption of any strength; `seeds` and an image's number decide its random draws."""
    many = max(1, _PIXELS_AT_ONCE // (images.shape[1] * images.shape[2]))
    result = np.empty_like(images)
    for first in range(0, len(images), many):
        part = images[first : first + many]
        numbers = range(start + first, start + first + len(part))
        rngs = [np.random.default_rng([seeds[0], zlib.crc32(name.encode()), seeds[1], n]) for n in numbers]
        result[first : first + many] = to_bytes(_FUNCTIONS[name](part, rngs, *strengths))
    return result


def is_small(images: Images) -> bool:
    """Return whether images [..., H, W, 3] count as small: 32-pixel strengths, and PNG on disk."""
    height, width = images.shape[-3:-1]
    return max(int(height), int(width)) <= _SMALL


def check_settings(
    names: Iterable[str], severities: Iterable[int], *, seed: int, constants: str, start: int = 0
) -> None:
    """Raise a SettingError for a corruption, severity, seed or set of constants that does not exist."""
    valid = (*CORRUPTIONS, *EXTRA_CORRUPTIONS)
    for name in names:
        if name not in valid:
            raise SettingError(f"names: unknown corruption {name!r}. {did_you_mean(str(name), valid)}")
    for severity in severities:
        if isinstance(severity, bool) or severity not in SEVERITIES:
            raise SettingError(f"severity={severity!r}: expected a whole number from 1 to 5.")
    for setting, value in (("seed", seed), ("start", start)):
        if not isinstance(value, int) or value < 0:
            raise SettingError(f"{setting}={value!r}: expected a whole number from 0 upwards.")
    if constants not in (*STRENGTHS, "auto"):
        raise SettingError(f"constants={constants!r} is unknown. {did_you_mean(constants, (*STRENGTHS, 'auto'))}")


def check_images(images: Any) -> None:
    """Raise an InputError unless these are uint8 images [N, H, W, 3] of a workable size."""
    if not isinstance(images, np.ndarray) or images.dtype != np.uint8:
        kind = getattr(images, "dtype", type(images).__name__)
        raise InputError(f"images: expected a numpy array of uint8, got {kind}. Scale to 0..255 and convert first.")
    if images.ndim != 4 or images.shape[3] != 3:
        raise InputError(f"images: expected the shape [N, H, W, 3], got {list(images.shape)}.")
    height, width = images.shape[1:3]
    if min(height, width) < _SMALLEST:
        raise InputError(f"images: expected at least {_SMALLEST} pixels a side, got {height} x {width}.")
