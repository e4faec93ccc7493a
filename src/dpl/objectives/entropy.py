"""Losses on the entropy of predictions, and masks and means over samples selected by it.

Unselected samples are masked, not dropped. Every shape stays fixed, so that a GPU is never synchronised.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from dpl.core.errors import SettingError
from dpl.core.numerics import full_precision

__all__ = [
    "conjugate_loss",
    "entropy",
    "entropy_margin",
    "entropy_of_probabilities",
    "gem_skd",
    "gem_t",
    "marginal_entropy",
    "masked_mean",
    "min_max",
    "opinion_entropy",
    "similarity_to",
    "soft_likelihood_ratio",
]

_COLDEST = 1e-6  # equal logits have no deviation; their softmax is uniform at any temperature
_SHORTEST = 1e-12  # logits that are all zero have no direction


@full_precision
def entropy(logits: Tensor) -> Tensor:
    """Return H(p) of the softmax of each row, in nats: [B, C] -> [B]."""
    log_p = F.log_softmax(logits, dim=1)
    return -(log_p.exp() * log_p).sum(dim=1)


def entropy_of_probabilities(p: Tensor, eps: float) -> Tensor:
    """Return -sum p log(p + eps) over the last dimension, in nats; `eps` keeps the logarithm of zero finite."""
    return -(p * (p + eps).log()).sum(dim=-1)


@full_precision
def opinion_entropy(logits: Tensor, mass: float | None = None) -> Tensor:
    """Return the entropy of the opinion over C classes and the unknown, [B, C] -> [B] (COME; Zhang et al., 2025).

    Class c has exp(logit_c), the unknown `mass` (None: C); 1e-7 is added to each share. No gradient flows along the
    length of a sample's logits.
    """
    length = logits.norm(dim=1, keepdim=True).clamp(min=_SHORTEST)
    held = logits / length * length.detach()
    unknown = torch.full_like(held[:, :1], math.log(mass or logits.shape[1]))
    opinion = torch.cat([held, unknown], dim=1).softmax(dim=1) + 1e-7
    return -(opinion * opinion.log()).sum(dim=1)


@full_precision
def marginal_entropy(logits: Tensor, eps: float = 1e-5) -> Tensor:
    """Return the entropy of the batch's mean prediction, a scalar: high if the predicted classes are balanced."""
    return entropy_of_probabilities(logits.softmax(dim=1).mean(dim=0), eps)


@full_precision
def conjugate_loss(logits: Tensor, epsilon: float = 0.0, temperature: float = 1.0) -> Tensor:
    """Return the loss of each sample under its conjugate label, for a model trained with PolyLoss: [B, C] -> [B].

    With h = logits / temperature and p = softmax(h), the conjugate label y solves

        (I + epsilon diag(p) - epsilon p p^T) y = p,    loss = log sum_k exp(h_k) - sum_k y_k (h_k - epsilon (1 - p_k)).

    By Sherman and Morrison's formula y_k is proportional to p_k / (1 + epsilon p_k) and sums to one, so that no system
    has to be solved. Gradients flow through y. With epsilon = 0 (cross-entropy) this is the entropy of p.
    """
    if not (epsilon >= 0 and temperature > 0):
        raise SettingError(
            f"epsilon={epsilon!r}, temperature={temperature!r}: expected an epsilon of at least 0 "
            "(0 for a source model trained with cross-entropy) and a temperature above 0"
        )
    log_p = F.log_softmax(logits / temperature, dim=1)
    p = log_p.exp()
    unscaled = p / (1 + epsilon * p)
    label = unscaled / unscaled.sum(dim=1, keepdim=True)
    return -(label * (log_p - epsilon * (1 - p))).sum(dim=1)


@full_precision
def gem_t(logits: Tensor, *, shared_weight: bool = False) -> Tensor:
    """GEM-T: T² H(softmax(h / T)) of each sample, h the centred logits, T twice their deviation: [B, C] -> [B].

    The centre and T carry no gradient. `shared_weight` weights every sample by the batch's mean of T².
    """
    centred, temperature = _centred(logits)
    return entropy(centred / temperature) * _squared(temperature, shared_weight)


@full_precision
def gem_skd(logits: Tensor, *, shared_weight: bool = False) -> Tensor:
    """GEM-SKD: T² times the cross-entropy of softmax(h / T) under softmax(h), which carries no gradient."""
    centred, temperature = _centred(logits)
    log_p = F.log_softmax(centred / temperature, dim=1)
    return -(centred.detach().softmax(dim=1) * log_p).sum(dim=1) * _squared(temperature, shared_weight)


@full_precision
def soft_likelihood_ratio(logits: Tensor, ceiling: float = 0.99, eps: float = 1e-5) -> Tensor:
    """Return -sum_c q_c log(q_c / (1 - q_c)) with q = softmax(logits), [B, C] -> [B] (Mummadi et al., 2021).

    Unlike that of the entropy, its gradient does not vanish with confidence. Probabilities are clamped to `ceiling`;
    `eps` keeps the logarithm finite.
    """
    q = logits.softmax(dim=1).clamp(max=ceiling)
    return -(q * (q / (1 - q) + eps).log()).sum(dim=1)


def entropy_margin(logits: Tensor, share: float) -> float:
    """Return E0 = share * ln C, in nats: a fraction of the largest possible entropy of C classes."""
    return share * math.log(logits.shape[1])


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Return the mean over the rows where `mask` holds, [B, ...] and [B] -> [...]; zero, also its gradient, if none."""
    rows = mask.reshape(-1, *[1] * (values.ndim - 1))
    return torch.where(rows, values, 0).sum(dim=0) / mask.sum().clamp(min=1)


def min_max(values: Tensor) -> Tensor:
    """Scale the values [B] to 0..1; equal ones become zero."""
    low, high = values.aminmax()
    return (values - low) / torch.where(high > low, high - low, 1)


def similarity_to(average: Tensor, probabilities: Tensor) -> Tensor:
    """Return the cosine between an average prediction [C] and each row [B, C] -> [B]; zero if the average is zero."""
    return F.cosine_similarity(average[None].to(probabilities.dtype), probabilities, dim=1)


def _centred(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return h [B, C] and T [B, 1]."""
    centred = logits - logits.detach().mean(dim=1, keepdim=True)
    return centred, 2 * centred.detach().std(dim=1, keepdim=True).clamp(min=_COLDEST)


def _squared(temperature: Tensor, shared: bool) -> Tensor:
    squared = temperature.squeeze(1).square()
    return squared.mean() if shared else squared
