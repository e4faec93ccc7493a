"""From a decoded image to the tensor that a network gets: float, [3, H, W], values in [0, 1].

Normalisation by mean and standard deviation belongs to the network and is not done here. A transform works on 8-bit
pixels; conversion to floats comes last, so that a cache needs a quarter of the space.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageEnhance
from torch import Tensor

from dpl.core.errors import DataError, SettingError
from dpl.data.images import MAX_PIXELS

__all__ = [
    "Augmentation", "Evaluation", "Transform", "make_transform", "resize_crop", "square", "to_float", "training",
    "unchanged",
]  # fmt: skip

Pixels = NDArray[np.uint8]
_BILINEAR = Image.Resampling.BILINEAR


class Transform(Protocol):
    """Turns an image into pixels [H, W, 3]; the generator is for random transforms."""

    def pixels(self, image: Image.Image, generator: np.random.Generator | None = None) -> Pixels:
        """Return the transformed image as 8-bit RGB."""
        ...


def to_float(pixels: Pixels) -> Tensor:
    """Turn 8-bit pixels [..., H, W, 3] into floats [..., 3, H, W] between 0 and 1."""
    channels_first = np.ascontiguousarray(np.moveaxis(pixels, -1, -3))
    return torch.from_numpy(channels_first).to(torch.float32).div_(255)


@dataclass(frozen=True)
class Evaluation:
    """Resize, then cut out the centre; both the same at every call.

    `resize` is a (height, width), or the length of the shorter side with the proportions kept, or None; `crop` is
    the side of the square cut from the centre, or None.
    """

    resize: int | tuple[int, int] | None = None
    crop: int | None = None

    def __post_init__(self) -> None:
        for name, value in (("resize", self.resize), ("crop", self.crop)):
            if value is not None and _shorter(value) < 1:
                raise SettingError(f"{name}={value}: expected a positive number of pixels")
        if self.resize is not None and self.crop is not None and self.crop > _shorter(self.resize):
            raise SettingError(f"crop={self.crop} does not fit into resize={self.resize}; expected at most that")

    def __call__(self, image: Image.Image) -> Tensor:
        """Return the image as floats [3, H, W] between 0 and 1."""
        return to_float(self.pixels(image))

    def pixels(self, image: Image.Image, generator: np.random.Generator | None = None) -> Pixels:
        """Return the image as 8-bit RGB [H, W, 3]."""
        if self.resize is not None:
            image = image.resize(self._target(image), _BILINEAR)
        if self.crop is not None:
            image = _centre(image, self.crop)
        return np.array(image, dtype=np.uint8)

    def _target(self, image: Image.Image) -> tuple[int, int]:
        """(width, height) after the resize."""
        if isinstance(self.resize, tuple):
            return self.resize[1], self.resize[0]
        width, height = image.size
        short = self.resize or min(width, height)
        long = int(short * max(width, height) / min(width, height))
        if short * long > MAX_PIXELS:  # a strip one pixel wide would become millions long
            raise DataError(f"{width} x {height} pixels: too narrow to be resized to {short} x {long}")
        return (short, long) if width <= height else (long, short)


def _shorter(size: int | tuple[int, int]) -> int:
    return min(size) if isinstance(size, tuple) else size


def _centre(image: Image.Image, side: int) -> Image.Image:
    width, height = image.size
    if side > min(width, height):
        raise DataError(f"{width} x {height} pixels: smaller than the crop of {side}; resize first (resize_crop)")
    left, top = round((width - side) / 2), round((height - side) / 2)
    return image.crop((left, top, left + side, top + side))


def square(size: int, *, crop: int | None = None) -> Evaluation:
    """Resize to size x size, proportions not kept (DomainBed); `crop` then cuts the centre (DomainNet-126)."""
    return Evaluation(resize=(size, size), crop=crop)


def resize_crop(resize: int, crop: int) -> Evaluation:
    """Resize the shorter side to `resize`, proportions kept, and cut the central square `crop` (ImageNet)."""
    return Evaluation(resize=resize, crop=crop)


def unchanged() -> Evaluation:
    """Leave the pixels unchanged: for arrays, and for files that already have the network's size."""
    return Evaluation()


def make_transform(text: str) -> Evaluation:
    """Return the transform: `unchanged`, `square 224`, `square 256 crop 224` or `resize 256 crop 224`."""
    match text.split():
        case ["unchanged"]:
            return unchanged()
        case ["square", size] if size.isdecimal():
            return square(int(size))
        case ["square", size, "crop", crop] if size.isdecimal() and crop.isdecimal():
            return square(int(size), crop=int(crop))
        case ["resize", size, "crop", crop] if size.isdecimal() and crop.isdecimal():
            return resize_crop(int(size), int(crop))
    raise SettingError(
        f"transform: {text!r}; expected 'unchanged', 'square 224', 'square 256 crop 224' or 'resize 256 crop 224'"
    )


def training(size: int) -> "Augmentation":
    """Return the augmentation with which DomainBed trains its source models, for images of size x size."""
    return Augmentation(size)


@dataclass(frozen=True)
class Augmentation:
    """Random crop, flip, colour jitter and greying, all drawn from the generator of the call.

    The operations are exactly those of torchvision on Pillow images; the draws come from a generator argument,
    because torchvision draws from a global one, which threads would share and a resumed run could not restore.
    """

    size: int
    scale: tuple[float, float] = (0.7, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    jitter: float = 0.3
    hue: float = 0.3
    grey: float = 0.1

    def __post_init__(self) -> None:
        if self.size < 1:
            raise SettingError(f"size={self.size}: expected a positive number of pixels")

    def __call__(self, image: Image.Image, generator: np.random.Generator | None = None) -> Tensor:
        """Return one random version of the image as floats [3, H, W] between 0 and 1."""
        return to_float(self.pixels(image, generator))

    def pixels(self, image: Image.Image, generator: np.random.Generator | None = None) -> Pixels:
        """Return one random version of the image as 8-bit RGB [H, W, 3]."""
        draw = generator or np.random.default_rng()
        image = image.crop(self._box(image.size, draw)).resize((self.size, self.size), _BILINEAR)
        if draw.random() < 0.5:
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        image = self._jittered(image, draw)
        if draw.random() < self.grey:
            image = image.convert("L").convert("RGB")
        return np.array(image, dtype=np.uint8)

    def _box(self, size: tuple[int, int], draw: np.random.Generator) -> tuple[int, int, int, int]:
        """(left, top, right, bottom) of a random part of the image: the first of ten drawn shapes that fits."""
        width, height = size
        areas = width * height * draw.uniform(*self.scale, size=10)
        ratios = np.exp(draw.uniform(np.log(self.ratio[0]), np.log(self.ratio[1]), size=10))
        widths, heights = np.rint(np.sqrt(areas * ratios)), np.rint(np.sqrt(areas / ratios))
        fits = np.flatnonzero((widths >= 1) & (widths <= width) & (heights >= 1) & (heights <= height))
        if len(fits) == 0:  # a very long image: its central part of the nearest allowed shape
            wide, high = min(width, round(height * self.ratio[1])), min(height, round(width / self.ratio[0]))
            left, top = (width - wide) // 2, (height - high) // 2
        else:
            wide, high = int(widths[fits[0]]), int(heights[fits[0]])
            left, top = int(draw.integers(width - wide + 1)), int(draw.integers(height - high + 1))
        return left, top, left + wide, top + high

    def _jittered(self, image: Image.Image, draw: np.random.Generator) -> Image.Image:
        """Brightness, contrast, saturation and hue, each by a random amount, in random order."""
        amounts = [*draw.uniform(max(0.0, 1 - self.jitter), 1 + self.jitter, size=3), draw.uniform(-self.hue, self.hue)]
        for step in draw.permutation(4):
            image = _COLOUR_STEPS[step](image, float(amounts[step]))
        return image


def _shift_hue(image: Image.Image, shift: float) -> Image.Image:
    """Turn the colour circle by `shift` of a full turn."""
    hue, saturation, value = image.convert("HSV").split()
    turned = np.asarray(hue) + np.uint8(int(shift * 255) % 256)  # 8 bits wrap around, as a circle does
    return Image.merge("HSV", (Image.fromarray(turned), saturation, value)).convert("RGB")


_COLOUR_STEPS: tuple[Callable[[Image.Image, float], Image.Image], ...] = (
    lambda image, amount: ImageEnhance.Brightness(image).enhance(amount),
    lambda image, amount: ImageEnhance.Contrast(image).enhance(amount),
    lambda image, amount: ImageEnhance.Color(image).enhance(amount),
    _shift_hue,
)
