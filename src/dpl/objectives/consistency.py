"""Agreement between two predictions of the same samples."""

import torch.nn.functional as F
from torch import Tensor

from dpl.core.numerics import full_precision

__all__ = ["soft_cross_entropy", "symmetric_cross_entropy"]


@full_precision
def soft_cross_entropy(logits: Tensor, target_logits: Tensor) -> Tensor:
    """Return -sum_c q_c log p_c with p = softmax(logits) and q = softmax(target_logits): [B, C] twice -> [B].

    Gradients flow to both; detach the target of a one-sided loss.
    """
    return -(target_logits.softmax(dim=1) * F.log_softmax(logits, dim=1)).sum(dim=1)


@full_precision
def symmetric_cross_entropy(logits: Tensor, other_logits: Tensor) -> Tensor:
    """Return the mean of the soft cross-entropies in both directions: [B, C] twice -> [B]."""
    return 0.5 * (soft_cross_entropy(logits, other_logits) + soft_cross_entropy(other_logits, logits))
