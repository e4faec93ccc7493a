"""Corrupt a batch of images by the name of the corruption."""

import zlib
from collections.abc import Callable
from typing import Any, Final

import numpy as np

from dpl.data.corruptions import blur, digital, noise, weather
from dpl.data.corruptions.arrays import Floats, Images, to_bytes
from dpl.data.corruptions.constants import CIFAR, CORRUPTIONS, EXTRA_CORRUPTIONS, IMAGENET, SEVERITIES
from dpl.data.corruptions.spatter import spatter
from dpl.errors import InputError, SettingError, did_you_mean

__all__ = ["check_names", "check_severities", "corrupt"]

_SMALL: Final = 64  # images up to this side take the 32-pixel strengths
_SMALLEST: Final = 8  # below, elastic corners and glass neighbourhoods have no room
_PIXELS_AT_ONCE: Final = 2**17  # what is worked on at once fits the processor's cache

_FUNCTIONS: Final[dict[str, Callable[..., Floats]]] = {
    name: getattr(module, name)
    for module in (noise, blur, weather, digital)
    for name in (*CORRUPTIONS, *EXTRA_CORRUPTIONS)
    if hasattr(module, name)
} | {"spatter": spatter}


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
    check_names([name])
    check_severities([severity])
    _check_images(images)
    _check_whole(seed=seed, start=start)
    strengths = _strengths(constants, max(images.shape[1:3]))[name][severity - 1]
    many = max(1, _PIXELS_AT_ONCE // (images.shape[1] * images.shape[2]))
    result = np.empty_like(images)
    for first in range(0, len(images), many):
        part = images[first : first + many]
        numbers = range(start + first, start + first + len(part))
        rngs = [np.random.default_rng([seed, zlib.crc32(name.encode()), severity, n]) for n in numbers]
        result[first : first + many] = to_bytes(_FUNCTIONS[name](part, rngs, *strengths))
    return result


def _strengths(constants: str, side: int) -> dict[str, Any]:
    if constants == "auto":
        constants = "cifar" if side <= _SMALL else "imagenet"
    sets = {"cifar": CIFAR, "imagenet": IMAGENET}
    if constants not in sets:
        raise SettingError(f"constants={constants!r} is unknown. {did_you_mean(constants, [*sets, 'auto'])}")
    return sets[constants]


def check_names(names: Any) -> None:
    """Raise a SettingError for a corruption that does not exist."""
    valid = (*CORRUPTIONS, *EXTRA_CORRUPTIONS)
    for name in names:
        if name not in valid:
            raise SettingError(f"There is no corruption {name!r}. {did_you_mean(str(name), valid)}")


def check_severities(severities: Any) -> None:
    """Raise a SettingError for a severity other than 1 to 5."""
    for severity in severities:
        if severity not in SEVERITIES:
            raise SettingError(f"severity={severity!r} must be a whole number from 1 to 5.")


def _check_whole(**settings: int) -> None:
    for name, value in settings.items():
        if value < 0:
            raise SettingError(f"{name}={value} must not be negative.")


def _check_images(images: Any) -> None:
    if not isinstance(images, np.ndarray) or images.dtype != np.uint8:
        kind = getattr(images, "dtype", type(images).__name__)
        raise InputError(f"images must be a numpy array of uint8, got {kind}. Scale to 0..255 and convert first.")
    if images.ndim != 4 or images.shape[3] != 3:
        raise InputError(f"images must have the shape [N, H, W, 3], got {list(images.shape)}.")
    if min(images.shape[1:3]) < _SMALLEST:
        raise InputError(f"images must be at least {_SMALLEST} pixels a side, got {images.shape[1]} x {images.shape[2]}.")
