"""Sample-centric losses on cosine similarities to class prototypes, as alternatives to the prototype-centric ones."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from dpl.core.errors import InputError, SettingError
from dpl.core.numerics import cosines
from dpl.objectives.pseudo_label import labels_error

__all__ = ["arcface", "proxy_nca"]

_SMALLEST_SINE = 1e-6  # squared; a square root has no finite slope at zero


def arcface(features: Tensor, prototypes: Tensor, labels: Tensor, scale: float, margin: float = 0.0) -> Tensor:
    """ArcFace (Deng et al., CVPR 2019): cross-entropy of `scale` times cos(angle to each prototype).

    Args:
        features: z, [B, d].
        prototypes: w, [C, d], the rows of the classifier.
        labels: pseudo-labels [B] in 0..C-1, or -1 for a sample that is not used.
        scale: s, the factor of the cosines.
        margin: m, in radians; added to the angle between a sample and its own prototype.

    Returns:
        The mean over the samples used; zero (with zero gradient) if there is none.
    """
    if not (scale > 0 and 0 <= margin < math.pi):
        raise SettingError(f"scale={scale!r}, margin={margin!r}: expected a scale above 0 and a margin from 0 to pi")
    if labels.shape != features.shape[:1] or labels.dtype != torch.int64:
        raise labels_error(labels, features)
    cosine = cosines(features, prototypes)
    if margin > 0:
        own = F.one_hot(labels.clamp(min=0), cosine.shape[1]).bool()
        cosine = torch.where(own, _with_margin(cosine, margin), cosine)
    return _mean(F.cross_entropy(scale * cosine, labels, ignore_index=-1, reduction="none"), labels)


def proxy_nca(features: Tensor, prototypes: Tensor, labels: Tensor, scale: float = 1.0) -> Tensor:
    """Proxy-NCA (Movshovitz-Attias et al., ICCV 2017) on unit vectors.

        -log [ exp(-s d(z, w_y)) / sum over k != y of exp(-s d(z, w_k)) ],    d = squared distance = 2 - 2 cos

    The sample's own prototype is not in the denominator, so the loss can be negative. Arguments and the empty case are
    those of `arcface`.
    """
    if not scale > 0:
        raise SettingError(f"scale={scale!r}: expected a number above 0 (1 is the authors')")
    if len(prototypes) < 2:
        raise InputError(f"prototypes has shape {tuple(prototypes.shape)}: Proxy-NCA compares at least two classes")
    if labels.shape != features.shape[:1] or labels.dtype != torch.int64:
        raise labels_error(labels, features)
    closeness = 2 * scale * (cosines(features, prototypes) - 1)
    target = labels.clamp(min=0)[:, None]
    others = closeness.scatter(1, target, -torch.inf).logsumexp(dim=1)
    return _mean(others - closeness.gather(1, target).squeeze(1), labels)


def _with_margin(cosine: Tensor, margin: float) -> Tensor:
    """Return cos(angle + margin), continued by a falling line where the angle would exceed pi."""
    sine = (1 - cosine.square()).clamp(min=_SMALLEST_SINE).sqrt()
    turned = cosine * math.cos(margin) - sine * math.sin(margin)
    return torch.where(cosine > -math.cos(margin), turned, cosine - margin * math.sin(margin))


def _mean(per_sample: Tensor, labels: Tensor) -> Tensor:
    valid = labels >= 0
    return (per_sample * valid).sum() / valid.sum().clamp(min=1)
