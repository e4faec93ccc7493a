"""SANTA: stay with the source model's predictions, and contrast features with source prototypes.

Chakrabarty et al., SANTA: Source Anchoring Network and Target Alignment for Continual Test Time Adaptation, TMLR 2023.
With p and p~ the predictions for the images and for a view of them, a those of the frozen source network (with batch
statistics), z and z~ the features and g a projector:

    L_st  = mean_i [-1/2 sum_c p_ic log a_ic - 1/2 sum_c p~_ic log a_ic]
    L_con = contrast of the three views {nearest source prototype, z, z~} of each sample, projected by g
    L     = L_st + L_con

The student is outside the logarithm: L_st is smallest where all mass is on the class that the source prefers.
Updates: affine parameters of normalisation layers and g, with batch statistics. Needs: a linear classifier, and
labelled source batches once for the prototypes (mean feature of each class), of the size of the test batches, because
batch statistics are used there too. Output: from before the update. Adam 1e-3 is the RMT library's choice for CIFAR;
for ImageNet it is SGD with Nesterov's momentum and 0.01. The reference is that library: the authors publish no other.
Departure: a class without source images is never the nearest (there NaN wins for every image).
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from dpl.core.settings import setting
from dpl.methods.base import Fact, GradientMethod, Objective, Source
from dpl.methods.parts.projector import declare_projector, nearest_contrast
from dpl.methods.parts.source_data import class_means
from dpl.methods.parts.teacher import Teacher
from dpl.methods.registry import register
from dpl.methods.settings import GradientSettings
from dpl.network import Network, Pass
from dpl.objectives.consistency import soft_cross_entropy
from dpl.views import cotta_view

__all__ = ["SANTA", "SANTASettings"]


@dataclass(frozen=True, kw_only=True)
class SANTASettings(GradientSettings, norm="batch"):
    """Settings of SANTA."""

    temperature: float = setting(0.1, "tau of the contrast", low=1e-4)
    projection: int = setting(128, "width of the projector; 0: none (DomainNet-126)", low=0)
    anchor_weight: float = setting(1.0, "weight of the agreement with the source network", low=0)
    contrast_weight: float = setting(1.0, "weight of the contrast", low=0)
    prototype_samples: int = setting(100_000, "source images after which the prototypes are ready", low=1)
    augment: Callable[[Tensor], Tensor] | None = setting(None, "view of a batch; CoTTA's when not given")


@register(
    "santa",
    paper="Chakrabarty et al., SANTA: Source Anchoring Network and Target Alignment, TMLR 2023",
    updates="affine parameters of normalisation layers and a projector",
    passes="3 forward, 2 backward",
    needs_classifier=True,
    source="once",
    views=True,
)
class SANTA(GradientMethod[SANTASettings]):
    """Source anchoring and target alignment."""

    settings_class = SANTASettings
    anchor: Teacher
    projector: nn.Module
    prototypes: Tensor  # [C, d]; a row of zeros for a class without source images

    def __init__(self, network: Network, settings: SANTASettings) -> None:
        super().__init__(network, settings)
        self.augment = settings.augment or cotta_view(per_sample=False)
        self.declare_part("anchor", Teacher(network))  # never follows: the source model
        self.declare(prototypes=torch.zeros_like(network.prototypes))

    def trained_parameters(self) -> dict[str, Parameter]:
        """Return the network's parameters and the projector's."""
        return super().trained_parameters() | declare_projector(self, self.settings.projection)

    def prepare(self, source: Source | None) -> None:
        """Compute the prototypes."""
        batches = self.require_source(source, relative="roid")
        self.prototypes, _ = class_means(self.network, batches, self.settings.prototype_samples)

    def loss(self, out: Pass) -> Objective:
        """L."""
        s = self.settings
        view = self.network(self.view(out.images))
        source = self.anchor(out.images).logits
        anchoring = 0.5 * (soft_cross_entropy(source, out.logits) + soft_cross_entropy(source, view.logits)).mean()
        contrast = nearest_contrast(self.projector, self.prototypes, out, view, s.temperature)
        facts: dict[str, Fact] = {"anchoring": anchoring.detach(), "view_contrast": contrast.detach()}
        return Objective(s.anchor_weight * anchoring + s.contrast_weight * contrast, None, facts)
