"""Crops, turns, shifts, flips and zooms of image batches by one bilinear sampling, and blur.

A view that pads, warps and crops uses only a part of the padding. Sampling the original image with the matching rule
for pixels outside gives the same result without computing the other three quarters.
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from dpl.views.draw import Draw

__all__ = [
    "SamplingGrid",
    "blur",
    "centred",
    "crop",
    "random_resized_crop",
    "sample",
    "turned",
    "wander",
    "zoomed_crop",
]


@dataclass
class SamplingGrid:
    """The source position of each output pixel: columns and rows [B or 1, H, W], counted from the first pixel."""

    x: Tensor
    y: Tensor

    def flip(self, chosen: Tensor) -> "SamplingGrid":
        """Mirror the chosen images ([B or 1, 1, 1, 1]) from left to right."""
        chosen = chosen[:, 0]
        return SamplingGrid(torch.where(chosen, self.x.flip(-1), self.x), torch.where(chosen, self.y.flip(-1), self.y))


def centred(images: Tensor, margin: int = 0) -> SamplingGrid:
    """Return the position of each pixel, with `margin` more pixels on each side."""
    height, width = images.shape[-2:]
    x = torch.arange(-margin, width + margin, device=images.device, dtype=images.dtype)
    y = torch.arange(-margin, height + margin, device=images.device, dtype=images.dtype)
    return SamplingGrid(x.view(1, 1, -1), y.view(1, -1, 1))


def wander(
    images: Tensor, draw: Draw, *, degrees: float, shift: float, scale: tuple[float, float], margin: int
) -> SamplingGrid:
    """Turn, scale and shift (by whole pixels, up to `shift` of a side) about the centre, as RandomAffine does."""
    height, width = images.shape[-2:]
    angle = torch.deg2rad(draw.uniform(-degrees, degrees))
    right, down = (draw.uniform(-shift * side, shift * side).round() for side in (width, height))
    return turned(images, angle, draw.uniform(*scale), right, down, margin)


def turned(images: Tensor, angle: Tensor, scale: Tensor, right: Tensor, down: Tensor, margin: int = 0) -> SamplingGrid:
    """Turn clockwise by `angle` about the centre, scale, then shift; all [B or 1, 1, 1, 1]."""
    angle, scale, right, down = (factor[:, 0] for factor in (angle, scale, right, down))
    middle_x, middle_y = (images.shape[-1] - 1) / 2, (images.shape[-2] - 1) / 2
    grid = centred(images, margin)
    x, y = grid.x - middle_x - right, grid.y - middle_y - down
    cos, sin = angle.cos() / scale, angle.sin() / scale
    return SamplingGrid(cos * x + sin * y + middle_x, cos * y - sin * x + middle_y)


def zoomed_crop(images: Tensor, draw: Draw, zoom: float) -> SamplingGrid:
    """Enlarge by `zoom` and crop a part of the original size at random."""
    places = []
    grid = centred(images)
    for axis, side in ((grid.x, images.shape[-1]), (grid.y, images.shape[-2])):
        enlarged = max(side, round(side * zoom))
        offset = (draw.uniform(0, 1)[:, 0] * (enlarged - side + 1)).floor()
        places.append(((axis + offset + 0.5) * (side / enlarged) - 0.5).clamp(0, side - 1))
    return SamplingGrid(*places)


def random_resized_crop(images: Tensor, draw: Draw, smallest: float, attempts: int = 10) -> SamplingGrid:
    """Crop an area from `smallest` to all of the image, with an aspect from 3:4 to 4:3, and enlarge it to full size."""
    height, width = images.shape[-2:]
    area = height * width * draw.uniform(smallest, 1, attempts)
    aspect = draw.uniform(math.log(3 / 4), math.log(4 / 3), attempts).exp()
    wide, high = (area * aspect).sqrt().round(), (area / aspect).sqrt().round()
    fits = (wide >= 1) & (wide <= width) & (high >= 1) & (high <= height)
    first = fits.float().argmax(dim=1, keepdim=True)  # the first attempt that fits; the whole image if none does
    found = fits.any(dim=1, keepdim=True)
    wide = torch.where(found, wide.gather(1, first), width)
    high = torch.where(found, high.gather(1, first), height)
    left = (draw.uniform(0, 1) * (width - wide + 1)).floor()
    top = (draw.uniform(0, 1) * (height - high + 1)).floor()
    return crop(images, left, top, wide, high)


def crop(images: Tensor, left: Tensor, top: Tensor, wide: Tensor, high: Tensor) -> SamplingGrid:
    """Enlarge the given part to the size of the whole; all [B or 1, 1, 1, 1]. Nothing outside the part is seen."""
    left, top, wide, high = (factor[:, 0] for factor in (left, top, wide, high))
    grid = centred(images)
    x = ((grid.x + 0.5) * (wide / images.shape[-1]) - 0.5).clamp(min=0)
    y = ((grid.y + 0.5) * (high / images.shape[-2]) - 0.5).clamp(min=0)
    return SamplingGrid(left + torch.minimum(x, wide - 1), top + torch.minimum(y, high - 1))


def sample(images: Tensor, places: SamplingGrid, outside: Literal["border", "reflection"] = "border") -> Tensor:
    """Look the places up by bilinear interpolation; outside, the border or the mirror image is used."""
    height, width = images.shape[-2:]
    size = (len(images), places.y.shape[1], places.x.shape[2])
    x, y = 2 * places.x / max(width - 1, 1) - 1, 2 * places.y / max(height - 1, 1) - 1
    grid = torch.stack([x.expand(size), y.expand(size)], dim=-1)
    return F.grid_sample(images, grid, "bilinear", outside, align_corners=True)


def blur(images: Tensor, sigma: Tensor, radius: int) -> Tensor:
    """Convolve with a Gaussian of one `sigma` for each image; the result is `radius` smaller on each side."""
    batch, channels, height, width = images.shape
    steps = torch.arange(-radius, radius + 1, device=images.device, dtype=images.dtype)
    kernel = torch.exp(-0.5 * (steps / sigma.view(-1, 1)) ** 2)
    kernel = (kernel / kernel.sum(dim=1, keepdim=True)).expand(batch, -1).repeat_interleave(channels, dim=0)
    maps = images.reshape(1, batch * channels, height, width)
    maps = F.conv2d(maps, kernel[:, None, :, None], groups=batch * channels)
    maps = F.conv2d(maps, kernel[:, None, None, :], groups=batch * channels)
    return maps.view(batch, channels, height - 2 * radius, width - 2 * radius)
