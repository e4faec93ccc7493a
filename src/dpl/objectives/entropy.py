"""Losses on the predicted distribution."""

import torch.nn.functional as F
from torch import Tensor

from dpl.core.numerics import full_precision

__all__ = ["entropy", "marginal_entropy"]


@full_precision
def entropy(logits: Tensor) -> Tensor:
    """H(p) of each row's softmax, in nats: [B, C] -> [B]."""
    log_p = F.log_softmax(logits, dim=1)
    return -(log_p.exp() * log_p).sum(dim=1)


@full_precision
def marginal_entropy(logits: Tensor, eps: float = 1e-5) -> Tensor:
    """Entropy of the batch's mean prediction, a scalar: high when the predicted classes are balanced."""
    mean = logits.softmax(dim=1).mean(dim=0)
    return -(mean * (mean + eps).log()).sum()
