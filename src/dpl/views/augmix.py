"""AugMix: random chains of mild image operations, mixed with each other and with the image.

Hendrycks et al., AugMix: A Simple Data Processing Method to Improve Robustness and Uncertainty, ICLR 2020. Every image
draws its own operations; they are computed for the whole batch and chosen by masks.
"""

import torch
from torch import Tensor

from dpl.views.draw import Draw
from dpl.views.geometry import SamplingGrid, sample, turned

__all__ = ["augmix", "autocontrast", "equalize"]

_CHAINS, _DEPTH = 3, 3
_GEOMETRIC, _OPERATIONS = 5, 9  # rotation, two shears, two shifts; then four changes of values


def augmix(images: Tensor, draw: Draw) -> Tensor:
    """Return m x + (1 - m) sum_i w_i chain_i(x), with w from Dirichlet(1, 1, 1) and m from Beta(1, 1)."""
    weights = -draw.uniform(torch.finfo(images.dtype).tiny, 1, _CHAINS).log()  # exponential; their shares are Dirichlet
    weights = weights / weights.sum(dim=1, keepdim=True)
    mixed = torch.zeros_like(images)
    for i in range(_CHAINS):
        chain, depth = images, draw.uniform(0, _DEPTH)
        for step in range(_DEPTH):
            chain = torch.where(depth >= step, _random_operation(chain, draw), chain)
        mixed = mixed + weights[:, i : i + 1] * chain
    return torch.lerp(mixed, images, draw.uniform(0, 1))


def _random_operation(images: Tensor, draw: Draw) -> Tensor:
    """Apply one of nine operations at a random strength, from 1 to 10 % of its range, to each image."""
    kind, strength = draw.uniform(0, _OPERATIONS).floor(), draw.uniform(0.01, 0.1)
    signed = torch.where(draw.chance(0.5), strength, -strength)
    moved = sample(images, _moved(images, kind, signed))
    values = torch.round(images * 255)
    changed = torch.where(kind == 5, autocontrast(images), equalize(images))
    changed = torch.where(kind == 7, torch.floor(values / 16) * 16 / 255, changed)  # four bits
    changed = torch.where(kind == 8, torch.where(values >= 256 - (256 * strength).floor(), 1 - images, images), changed)
    return torch.where(kind < _GEOMETRIC, moved, changed)


def _moved(images: Tensor, kind: Tensor, signed: Tensor) -> SamplingGrid:
    """Return the places of a rotation (up to 30 degrees at full strength), a shear (0.3) or a shift (a third)."""
    height, width = images.shape[-2:]
    amount = [torch.where(kind == k, signed, 0) for k in range(_GEOMETRIC)]
    degrees, across, down = (30 * amount[0]).trunc(), (width / 3 * amount[3]).trunc(), (height / 3 * amount[4]).trunc()
    grid = turned(images, torch.deg2rad(degrees), torch.ones_like(degrees), across, down)
    return SamplingGrid(grid.x + 0.3 * amount[1][:, 0] * grid.y, grid.y + 0.3 * amount[2][:, 0] * grid.x)


def autocontrast(images: Tensor) -> Tensor:
    """Stretch each channel to 0..1; one of a single value stays."""
    low, high = images.amin(dim=(2, 3), keepdim=True), images.amax(dim=(2, 3), keepdim=True)
    return torch.where(high > low, (images - low) / (high - low).clamp(min=1e-12), images)


def equalize(images: Tensor) -> Tensor:
    """Equalise the histogram of each channel in 256 levels, as PIL's ImageOps does."""
    level = torch.round(images * 255).long().flatten(2)  # [B, C, pixels]
    counts = torch.zeros(*level.shape[:2], 256, dtype=torch.int64, device=images.device)
    counts = counts.scatter_add(2, level, torch.ones_like(level))
    last = counts.gather(2, level.amax(dim=2, keepdim=True))
    step = (level.shape[2] - last) // 255
    table = ((counts.cumsum(dim=2) - counts + step // 2) // step.clamp(min=1)).clamp(0, 255)
    equal = (table.gather(2, level).to(images.dtype) / 255).view_as(images)
    return torch.where(step[..., None] > 0, equal, images)
