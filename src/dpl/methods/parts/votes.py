"""What TAST and TAST-BN share: neighbours vote by scaled cosines, in the spaces of an ensemble of small heads."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpl.core.numerics import at_least_float32, full_precision
from dpl.core.random import Random

__all__ = ["EnsembleHead", "mean_divergence", "project", "scaled_cosine", "vote"]


class EnsembleHead(nn.Module):
    """E linear maps from d to d/4 that share a matrix and differ in the scales before and after it."""

    def __init__(self, width: int, members: int, random: Random, dtype: torch.dtype) -> None:
        super().__init__()
        narrow = max(1, width // 4)

        def drawn(*shape: int) -> nn.Parameter:
            values = nn.init.kaiming_normal_(torch.empty(shape, dtype=dtype), generator=random.generator)
            return nn.Parameter(values.to(random.device))

        self.weight = drawn(narrow, width)
        self.scale_in = drawn(members, width)
        self.scale_out = drawn(members, narrow)
        self.bias = nn.Parameter(torch.zeros_like(self.scale_out))

    def forward(self, features: Tensor) -> Tensor:
        """Project [n, d] to [E, n, d/4]."""
        shared = F.linear(features * self.scale_in[:, None], self.weight)
        return shared * self.scale_out[:, None] + self.bias[:, None]


@full_precision
def project(features: Tensor, head: EnsembleHead) -> Tensor:
    """Return the direction of each row in the space of each member, [E, n, d/4]."""
    return F.normalize(at_least_float32(head(features.to(head.weight.dtype))), dim=-1)


@full_precision
def scaled_cosine(directions: Tensor, centroids: Tensor, scale: float) -> Tensor:
    """Return tau cos(v, m_c) for normalised rows, [..., n, C]; 0 where a centroid is zero."""
    return scale * directions @ centroids.mT


@full_precision
def mean_divergence(logits: Tensor, targets: Tensor) -> Tensor:
    """Return KL(target || softmax), averaged over samples and classes as the authors do."""
    return (torch.xlogy(targets, targets) - targets * logits.log_softmax(dim=-1)).mean()


def vote(logits: Tensor, found: Tensor) -> tuple[Tensor, Tensor]:
    """Average the neighbours' one-hot arg-max and their softmax, [..., B, k, C] -> two of [..., B, C]."""
    weight = found[..., None].to(logits.dtype)  # [B, k, 1]
    weight = weight / weight.sum(dim=-2, keepdim=True).clamp(min=1)
    hard = F.one_hot(logits.argmax(dim=-1), logits.shape[-1]).to(logits.dtype)
    return (hard * weight).sum(dim=-2), (logits.softmax(dim=-1) * weight).sum(dim=-2)
