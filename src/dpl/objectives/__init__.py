"""Losses as pure functions: tensors in, a scalar or one value per sample out.

A loss knows no network, method or memory, and keeps no state.
"""

from dpl.objectives.consistency import soft_cross_entropy, symmetric_cross_entropy
from dpl.objectives.contrastive import class_aware_info_nce, view_contrast
from dpl.objectives.entropy import (
    conjugate_loss,
    entropy,
    entropy_margin,
    entropy_of_probabilities,
    gem_skd,
    gem_t,
    marginal_entropy,
    masked_mean,
    min_max,
    opinion_entropy,
    similarity_to,
    soft_likelihood_ratio,
)
from dpl.objectives.prototype import (
    adain,
    classes_present,
    dpl_o,
    dpl_soft,
    dpl_star,
    prototype_regularization,
    restyle,
    style_statistics,
)
from dpl.objectives.proxy import arcface, proxy_nca
from dpl.objectives.pseudo_label import confident_cross_entropy, confident_labels

__all__ = [
    "adain",
    "arcface",
    "class_aware_info_nce",
    "classes_present",
    "confident_cross_entropy",
    "confident_labels",
    "conjugate_loss",
    "dpl_o",
    "dpl_soft",
    "dpl_star",
    "entropy",
    "entropy_margin",
    "entropy_of_probabilities",
    "gem_skd",
    "gem_t",
    "marginal_entropy",
    "masked_mean",
    "min_max",
    "opinion_entropy",
    "prototype_regularization",
    "proxy_nca",
    "restyle",
    "similarity_to",
    "soft_cross_entropy",
    "soft_likelihood_ratio",
    "style_statistics",
    "symmetric_cross_entropy",
    "view_contrast",
]
