"""Agreement between two predictions of the same samples."""

import torch.nn.functional as F
from torch import Tensor

from dpl.core.numerics import at_least_float32, full_precision

__all__ = ["soft_cross_entropy", "symmetric_cross_entropy"]


@full_precision
def soft_cross_entropy(logits: Tensor, target_logits: Tensor) -> Tensor:
    """-sum_c q_c log p_c with p = softmax(logits) and q = softmax(target_logits): [B, C] twice -> [B].

    Gradients reach both; detach the target where it should only teach.
    """
    targets = at_least_float32(target_logits).softmax(dim=1)
    return -(targets * F.log_softmax(logits, dim=1)).sum(dim=1)


@full_precision
def symmetric_cross_entropy(logits: Tensor, other_logits: Tensor) -> Tensor:
    """Mean of the two soft cross-entropies, each prediction teaching the other: [B, C] twice -> [B]."""
    return 0.5 * (soft_cross_entropy(logits, other_logits) + soft_cross_entropy(other_logits, logits))
