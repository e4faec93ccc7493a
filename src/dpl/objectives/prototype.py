"""Prototype-centric losses of Decoupled Prototype Learning (Eq. 3, 4, 6 of the paper), soft DPL, AdaIN (Eq. 8 to 10).

All are pure functions. A label of -1 marks a sample that is not confident; it is neither a positive nor a negative.
Masks keep every shape fixed, so that a GPU is never synchronised.

Eq. 3 and 4 compare the samples with the prototypes of classes that are present only. The work is O(B² d) for a batch
of B and does not depend on the number of classes.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from dpl.core.errors import InputError
from dpl.core.numerics import cosines, variance_and_mean
from dpl.objectives.pseudo_label import labels_error

__all__ = [
    "adain", "classes_present", "dpl_o", "dpl_soft", "dpl_star",
    "prototype_regularization", "restyle", "style_statistics",
]  # fmt: skip


def dpl_o(features: Tensor, prototypes: Tensor, labels: Tensor, temperature: float) -> Tensor:
    """Eq. 3: each confident sample against the samples of other classes, as seen by its own prototype.

    Args:
        features: z, [B, d].
        prototypes: w, [C, d], the rows of the classifier.
        labels: pseudo-labels [B] in 0..C-1, or -1 for a sample that is not confident.
        temperature: tau.

    Returns:
        The mean over confident samples; zero (with zero gradient) if there is none or only one class.
    """
    if labels.shape != features.shape[:1] or labels.dtype != torch.int64:
        raise labels_error(labels, features)
    similarity = cosines(prototypes, features, temperature, rows=labels.clamp(min=0))  # [B, B]
    valid = labels >= 0
    itself = torch.eye(len(labels), dtype=torch.bool, device=labels.device)
    others = valid & (labels[:, None] != labels[None, :])
    denominator = similarity.masked_fill(~(others | itself), -torch.inf).logsumexp(dim=1)
    per_sample = denominator - similarity.diagonal()
    return (per_sample * valid).sum() / valid.sum().clamp(min=1)


def dpl_star(features: Tensor, prototypes: Tensor, labels: Tensor, temperature: float) -> Tensor:
    """Eq. 4: for each class present, its prototype against all its samples together and all the others.

    Arguments and empty cases are those of `dpl_o`. Row i below belongs to the class of sample i. Rows of the same class
    are equal, so that weighting each by one over its class size gives the mean over classes.
    """
    if labels.shape != features.shape[:1] or labels.dtype != torch.int64:
        raise labels_error(labels, features)
    similarity = cosines(prototypes, features, temperature, rows=labels.clamp(min=0))  # [B, B]
    valid = labels >= 0
    same = labels[:, None] == labels[None, :]
    itself = torch.eye(len(labels), dtype=torch.bool, device=labels.device)
    positives = similarity.masked_fill(~((same & valid) | itself), -torch.inf).logsumexp(dim=1)
    everything = similarity.masked_fill(~(valid | itself), -torch.inf).logsumexp(dim=1)
    share = valid.to(similarity.dtype) / same.sum(dim=1)  # 1 / |Z+| for confident rows
    return ((everything - positives) * share).sum() / share.sum().clamp(min=1)


def dpl_soft(features: Tensor, prototypes: Tensor, responsibilities: Tensor, temperature: float) -> Tensor:
    """Eq. 4 without labels: every sample is a positive of every class, by its responsibility.

        s_ik = cos(w_k, z_i) / tau,  pi_k = min(1, sum_i R_ik)
        L = sum_k pi_k (log sum_i e^{s_ik} - log sum_i R_ik e^{s_ik}) / sum_k pi_k

    Args:
        features: z, [B, d].
        prototypes: w, [C, d], the rows of the classifier.
        responsibilities: R, [B, C], how far each sample belongs to each class, 0 to 1: its probabilities, as a rule.
        temperature: tau.

    Returns:
        The mean over classes, each weighted by its share in the batch up to one sample. With R one-hot this is
        `dpl_star` over the same samples.
    """
    if responsibilities.shape != (len(features), len(prototypes)):
        raise InputError(
            f"responsibilities has shape {tuple(responsibilities.shape)}; expected one row for each sample and one "
            f"column for each prototype, {(len(features), len(prototypes))}"
        )
    similarity = cosines(prototypes, features, temperature)  # [C, B]
    shares = responsibilities.T.to(similarity.dtype)
    logs = shares.clamp(min=torch.finfo(shares.dtype).tiny).log()  # an empty class stays finite, and weighs nothing
    contrast = similarity.logsumexp(dim=1) - (similarity + logs).logsumexp(dim=1)
    weights = shares.sum(dim=1).clamp(max=1)
    return (contrast * weights).sum() / weights.sum().clamp(min=1)


def prototype_regularization(
    prototypes: Tensor, memory: Tensor, temperature: float, rows: Tensor | None = None
) -> Tensor:
    """Eq. 6: each prototype against the pseudo-features of all classes.

    `rows` restricts the outer mean to some classes. Rows drawn at random give an unbiased estimate, if there are too
    many classes for all C² similarities.
    """
    if prototypes.shape != memory.shape:
        raise InputError(
            f"memory has shape {tuple(memory.shape)}; expected that of the prototypes, {tuple(prototypes.shape)}"
        )
    targets = torch.arange(len(prototypes), device=prototypes.device) if rows is None else rows
    return F.cross_entropy(cosines(prototypes, memory, temperature, rows), targets)


def classes_present(labels: Tensor) -> Tensor:
    """Return C', the number of distinct classes among the labels that are not -1, as a 0-d tensor."""
    same = labels[:, None] == labels[None, :]
    return ((labels >= 0) / same.sum(dim=1)).sum().round()


def adain(content: Tensor, style: Tensor, eps: float = 1e-6, *, detach: bool = True) -> Tensor:
    """Eq. 8 to 10: give `content` the per-channel mean and deviation of `style`.

    Both are feature maps [B, C, H, W] or token sequences [B, T, C]. The variance is the biased one of Eq. 9;
    `eps` keeps the root of a constant channel finite. Statistics carry no gradient by default.
    """
    if content.ndim not in (3, 4) or content.ndim != style.ndim:
        raise InputError(
            f"adain: content has shape {tuple(content.shape)} and style {tuple(style.shape)}; "
            "expected two feature maps [B, C, H, W] or two token sequences [B, T, C]"
        )
    return restyle(content, *style_statistics(style, eps, detach=detach), eps, detach=detach)


def style_statistics(maps: Tensor, eps: float = 1e-6, *, detach: bool = True) -> tuple[Tensor, Tensor]:
    """Eq. 8 and 9: mean and deviation of each channel over space (or over tokens), keeping the dimensions."""
    spatial = (2, 3) if maps.ndim == 4 else (1,)
    variance, mean = variance_and_mean(maps.detach() if detach else maps, spatial)
    return mean, (variance + eps).sqrt()


def restyle(content: Tensor, mean: Tensor, deviation: Tensor, eps: float = 1e-6, *, detach: bool = True) -> Tensor:
    """Eq. 10 with the style's statistics given."""
    own_mean, own_deviation = style_statistics(content, eps, detach=detach)
    scale = deviation / own_deviation  # one scale and shift for each channel: a single pass over the maps
    return torch.addcmul(mean - own_mean * scale, content, scale).to(content.dtype)
