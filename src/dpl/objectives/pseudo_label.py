"""Pseudo-labels: which samples are confident, and cross-entropy on them."""

import torch
import torch.nn.functional as F
from torch import Tensor

from dpl.core.numerics import at_least_float32, full_precision

__all__ = ["confident_cross_entropy", "confident_labels"]


def confident_labels(logits: Tensor, confidence: float) -> Tensor:
    """Eq. 1 with its threshold: the arg-max where its probability is strictly above `confidence`, else -1."""
    top, labels = at_least_float32(logits.detach()).softmax(dim=1).max(dim=1)
    return torch.where(top > confidence, labels, -1)


@full_precision
def confident_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Eq. 2: mean cross-entropy over the samples whose label is not -1; zero if there is none."""
    total = F.cross_entropy(logits, labels, ignore_index=-1, reduction="sum")
    return total / (labels >= 0).sum().clamp(min=1)
