"""Pseudo-labels: which samples are confident, and cross-entropy on them."""

import torch
import torch.nn.functional as F
from torch import Tensor

from dpl.core.errors import InputError
from dpl.core.numerics import full_precision

__all__ = ["confident_cross_entropy", "confident_labels", "labels_error"]


def confident_labels(logits: Tensor, confidence: float) -> Tensor:
    """Eq. 1 with its threshold: the arg-max where its probability is strictly above `confidence`, else -1."""
    at_least_float32 = torch.promote_types(logits.dtype, torch.float32)
    top, labels = logits.detach().softmax(dim=1, dtype=at_least_float32).max(dim=1)
    return torch.where(top > confidence, labels, -1)


@full_precision
def confident_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Eq. 2: mean cross-entropy over the samples whose label is not -1; zero if there is none."""
    total = F.cross_entropy(logits, labels, ignore_index=-1, reduction="sum")
    return total / (labels >= 0).sum().clamp(min=1)


def labels_error(labels: Tensor, features: Tensor) -> InputError:
    """Return the error for labels that do not belong to the features [B, d]."""
    return InputError(
        f"labels have shape {tuple(labels.shape)} and dtype {labels.dtype}; expected int64 [{len(features)}]"
    )
