"""Pure losses: tensors in, a scalar (or one value per sample) out."""

from dpl.objectives.entropy import entropy, marginal_entropy
from dpl.objectives.prototype import (
    adain,
    classes_present,
    dpl_o,
    dpl_star,
    prototype_regularization,
    restyle,
    style_statistics,
)
from dpl.objectives.pseudo_label import confident_cross_entropy, confident_labels

__all__ = [
    "adain",
    "classes_present",
    "confident_cross_entropy",
    "confident_labels",
    "dpl_o",
    "dpl_star",
    "entropy",
    "marginal_entropy",
    "prototype_regularization",
    "restyle",
    "style_statistics",
]
