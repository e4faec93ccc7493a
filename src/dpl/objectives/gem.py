"""Generalised entropy: the entropy at a temperature that each sample's own logits set."""

import torch.nn.functional as F
from torch import Tensor

from dpl.core.numerics import full_precision

__all__ = ["gem_skd", "gem_t"]

_COLDEST = 1e-6  # equal logits have no spread; their softmax is uniform at any temperature


@full_precision
def gem_t(logits: Tensor, *, shared_weight: bool = False) -> Tensor:
    """GEM-T: T² H(softmax(h / T)) of each sample, h the centred logits, T twice their deviation: [B, C] -> [B].

    The centre and T carry no gradient. `shared_weight` weights every sample by the batch's mean of T².
    """
    centred, temperature = _centred(logits)
    log_p = F.log_softmax(centred / temperature, dim=1)
    return -(log_p.exp() * log_p).sum(dim=1) * _weight(temperature, shared_weight)


@full_precision
def gem_skd(logits: Tensor, *, shared_weight: bool = False) -> Tensor:
    """GEM-SKD: T² times the cross-entropy of softmax(h / T) under softmax(h), which carries no gradient."""
    centred, temperature = _centred(logits)
    log_p = F.log_softmax(centred / temperature, dim=1)
    return -(centred.detach().softmax(dim=1) * log_p).sum(dim=1) * _weight(temperature, shared_weight)


def _centred(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return h [B, C] and T [B, 1]."""
    centred = logits - logits.detach().mean(dim=1, keepdim=True)
    return centred, 2 * centred.detach().std(dim=1, keepdim=True).clamp(min=_COLDEST)


def _weight(temperature: Tensor, shared: bool) -> Tensor:
    squared = temperature.squeeze(1).square()
    return squared.mean() if shared else squared
