"""Synthetic shifts of labelled source images, for learning how the estimate errs where the answer is known.

They need no knowledge of the pixel range: strengths are relative to the images' own deviation and size.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["beside_others", "shifted_copies", "shrunk"]

_NOISE = 0.4  # of the images' standard deviation
_CONTRAST = 0.3  # of the original contrast
_SHRINK = 0.9  # of the size
_GRAIN = 16  # a blur or a block covers this part of the image's side, and at least 3 or 2 pixels


def shifted_copies(images: Tensor, generator: torch.Generator) -> Iterator[Tensor]:
    """Yield the images as they are, then with noise and less contrast and, if they are images, blurred and coarse."""
    yield images
    noise = torch.randn(images.shape, generator=generator).to(images)
    yield images + _NOISE * images.std() * noise
    middle = images.flatten(1).mean(dim=1).reshape(-1, *[1] * (images.ndim - 1))
    yield middle + _CONTRAST * (images - middle)
    if images.ndim == 4 and min(images.shape[2:]) >= 4:
        height, width = images.shape[2:]
        half, block = max(1, min(height, width) // (2 * _GRAIN)), max(2, min(height, width) // _GRAIN)
        blurred = images
        for _ in range(2):
            blurred = F.avg_pool2d(F.pad(blurred, [half] * 4, mode="replicate"), 2 * half + 1, stride=1)
        yield blurred
        coarse = F.adaptive_avg_pool2d(images, (max(1, height // block), max(1, width // block)))
        yield F.interpolate(coarse, size=(height, width), mode="nearest")


def shrunk(images: Tensor) -> Tensor:
    """Return images shrunk a little about their centre, the border repeated; inputs that are not images get noise.

    It leaves every label as it is, digits and letters included, and interpolation takes off what a network reads from
    single pixels. A mirror image, which others use, changes digits.
    """
    if images.ndim != 4:
        signs = 1 - 2 * (torch.arange(images[0].numel(), device=images.device) % 2).to(images.dtype)
        return images + _NOISE / 4 * images.std() * signs.reshape(images.shape[1:])
    matrix = torch.eye(2, 3, dtype=images.dtype, device=images.device) / _SHRINK
    grid = F.affine_grid(matrix.expand(len(images), 2, 3), list(images.shape), align_corners=False)
    return F.grid_sample(images, grid, padding_mode="border", align_corners=False)


def beside_others(images: Tensor) -> Tensor:
    """Return a batch whose first rows are the shrunk images, followed by as many images with other content.

    The others are the images rotated, with their quarters exchanged, so they carry the same shift. A prediction that
    rests on the image stays; one that rests on a batch of a single class, whose statistics magnify small differences,
    does not. Inputs that are not images are mirrored about their mean instead.
    """
    if images.ndim != 4:
        return torch.cat([shrunk(images), 2 * images.mean(dim=0) - images])
    exchanged = images.roll((images.shape[2] // 2, images.shape[3] // 2), dims=(2, 3))
    others = torch.cat([exchanged[::2].rot90(1, (2, 3)), exchanged[1::2].rot90(3, (2, 3))])
    if others.shape[2:] != images.shape[2:]:
        others = F.interpolate(others, size=images.shape[2:], mode="bilinear")
    return torch.cat([shrunk(images), others])
