"""Colour changes with one factor for each image ([B, 1, 1, 1], or one for all), images in [0, 1].

The definitions are torchvision's. Saturation and hue exist for three channels only; other images keep theirs.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

__all__ = ["brightness", "colour_jitter", "contrast", "gamma", "hue", "saturation"]

_LUMA = (0.2989, 0.587, 0.114)  # of red, green and blue
_DARKEST = 1e-8  # below it a power has no finite slope


def brightness(images: Tensor, factor: Tensor) -> Tensor:
    """Scale towards black (0) or beyond the original (above 1)."""
    return (images * factor).clamp(0, 1)


def contrast(images: Tensor, factor: Tensor) -> Tensor:
    """Blend with the image's mean grey."""
    mean = _grey(images).mean(dim=(1, 2, 3), keepdim=True)
    return torch.lerp(mean, images, factor).clamp(0, 1)


def saturation(images: Tensor, factor: Tensor) -> Tensor:
    """Blend with the grey image; a factor of zero is the grey image."""
    if images.shape[1] != 3:
        return images
    return torch.lerp(_grey(images), images, factor).clamp(0, 1)


def hue(images: Tensor, shift: Tensor) -> Tensor:
    """Turn the colour circle by `shift`, a part of one whole turn."""
    if images.shape[1] != 3:
        return images
    top = images.amax(dim=1, keepdim=True)
    chroma = top - images.amin(dim=1, keepdim=True)
    red, green, blue = images[:, :1], images[:, 1:2], images[:, 2:]
    divisor = torch.where(chroma == 0, 1, chroma)  # grey has no hue; any will do
    sector = torch.where(
        top == red,
        (green - blue) / divisor,
        torch.where(top == green, 2 + (blue - red) / divisor, 4 + (red - green) / divisor),
    )
    # How far each channel is below the brightest one, as a function of the angle from its corner of the circle.
    corner = torch.tensor((5, 3, 1), device=images.device, dtype=images.dtype).view(1, 3, 1, 1)
    angle = corner + sector + 6 * shift
    angle = angle - 6 * (angle / 6).floor()
    return top - chroma * torch.minimum(angle, 4 - angle).clamp(0, 1)


def gamma(images: Tensor, exponent: Tensor) -> Tensor:
    """Raise to a power."""
    return images.clamp(_DARKEST, 1) ** exponent


_CHANGES = {"brightness": brightness, "contrast": contrast, "saturation": saturation, "hue": hue, "gamma": gamma}


def colour_jitter(images: Tensor, factors: Mapping[str, Tensor]) -> Tensor:
    """Apply the named changes in an order drawn once for the batch."""
    names = list(factors)
    for index in torch.randperm(len(names)).tolist():  # a CPU draw: no device is waited for
        images = _CHANGES[names[index]](images, factors[names[index]])
    return images


def _grey(images: Tensor) -> Tensor:
    if images.shape[1] != 3:
        return images.mean(dim=1, keepdim=True)
    luma = torch.tensor(_LUMA, device=images.device, dtype=images.dtype).view(1, 3, 1, 1)
    return (images * luma).sum(dim=1, keepdim=True)
