"""Which samples are worth learning from, by the entropy of their prediction, and means over those alone.

Unselected samples are masked, not dropped: every shape stays fixed, so that a GPU never waits for a count.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["entropy_margin", "masked_mean", "min_max", "similarity_to"]


def entropy_margin(logits: Tensor, share: float) -> float:
    """Return E0 = share * ln C, in nats: `share` of the largest entropy that C classes allow."""
    return share * math.log(logits.shape[1])


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Mean over the rows where `mask` holds, [B, ...] and [B] -> [...]; zero (with zero gradient) if there is none."""
    rows = mask.reshape(-1, *[1] * (values.ndim - 1))
    return torch.where(rows, values, 0).sum(dim=0) / mask.sum().clamp(min=1)


def min_max(values: Tensor) -> Tensor:
    """Stretch the values [B] to 0..1; equal ones become zero."""
    low, high = values.aminmax()
    return (values - low) / torch.where(high > low, high - low, 1)


def similarity_to(average: Tensor, probabilities: Tensor) -> Tensor:
    """Cosine between an average prediction [C] and each row [B, C] -> [B]; zero while the average is all zero."""
    return F.cosine_similarity(average[None].to(probabilities.dtype), probabilities, dim=1)
