"""How hard each sample pulls a prototype, read off the gradients of the real losses."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from dpl.objectives import confident_cross_entropy

__all__ = ["TAU", "Loss", "cross_entropy", "pulls", "unit"]

Loss = Callable[[Tensor, Tensor, Tensor, float], Tensor]  # features, prototypes, labels, temperature
TAU = 0.1
_SMALL = 1e-3


def unit(degrees: Tensor) -> Tensor:
    """Return unit vectors [N, 2] of the given directions."""
    angle = torch.deg2rad(degrees.double())
    return torch.stack([angle.cos(), angle.sin()], dim=-1)


def cross_entropy(features: Tensor, prototypes: Tensor, labels: Tensor, temperature: float) -> Tensor:
    """Return cross-entropy on pseudo-labels, on the same cosines as the DPL losses."""
    logits = F.normalize(features, dim=1) @ F.normalize(prototypes, dim=1).T / temperature
    return confident_cross_entropy(logits, labels)


def pulls(loss: Loss, features: Tensor, prototypes: Tensor, labels: Tensor, prototype: int) -> Tensor:
    """Return how hard each sample pulls (above 0) or pushes (below) one prototype: minus d loss / d similarity.

    Every sample gets a tiny component on an axis of its own, so that its part in the prototype's gradient can be read
    there.
    """
    count = len(features)
    own = F.normalize(features, dim=1) * (1 - _SMALL**2) ** 0.5
    padded = torch.cat([own, _SMALL * torch.eye(count, dtype=own.dtype)], dim=1)
    weights = F.pad(F.normalize(prototypes, dim=1), (0, count)).requires_grad_()
    (gradient,) = torch.autograd.grad(loss(padded, weights, labels, TAU), weights)
    return -gradient[prototype, -count:] * TAU / _SMALL
