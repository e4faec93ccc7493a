"""EATA: ETA held near the source by a Fisher-weighted penalty.

Niu et al., Efficient Test-Time Model Adaptation without Forgetting, ICML 2022.

    L = L_ETA + beta sum_k F_k (theta_k - theta0_k)^2                                             (Eq. 8)
    F = mean over source batches of (d/d theta of CE(f(x), argmax f(x)), mean over the batch)^2   (Eq. 9)

Updates: affine parameters of normalisation layers, with batch statistics. Needs: such layers, and source images
(`source=`; their labels are not used) once, in random order: the first `fisher_samples` of them. Output: from before
the update. Nothing selected: no step, also not of the penalty. `fisher_weight` (beta) is the RMT library's value for
CIFAR; for ImageNet it is 2000. F shrinks with the size of the source batches, so one beta belongs to one size.
Departures: those of ETA; batches above `fisher_batch` are cut, so that a whole data set can be given as one.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from dpl.core.errors import SettingError
from dpl.core.numerics import at_least_float32
from dpl.core.settings import setting
from dpl.methods.base import Objective, Source
from dpl.methods.eta import ETA, ETASettings
from dpl.methods.parts.source_weights import SourceWeights
from dpl.methods.registry import register
from dpl.network import Network, Pass

__all__ = ["EATA", "EATASettings"]


@dataclass(frozen=True, kw_only=True)
class EATASettings(ETASettings):
    """Settings of EATA."""

    fisher_weight: float = setting(1.0, "beta: weight of the penalty; 0 needs no source images", low=0)
    fisher_samples: int = setting(2000, "how many source images are used", low=1)
    fisher_batch: int = setting(200, "larger source batches are cut to this size", low=1)


@register(
    "eata",
    paper="Niu et al., Efficient Test-Time Model Adaptation without Forgetting, ICML 2022",
    updates="affine parameters of normalisation layers",
    passes="1 forward, 1 backward",
    source="once",
)
class EATA(ETA[EATASettings]):
    """Weighted entropy of reliable, non-redundant samples, and a penalty on leaving the source."""

    settings_class = EATASettings
    fisher: Tensor  # F, the diagonals of all trainable parameters, flat
    source_weights: SourceWeights

    def __init__(self, network: Network, settings: EATASettings) -> None:
        super().__init__(network, settings)
        self.declare_part("source_weights", SourceWeights(self.trainable))
        self.declare(fisher=torch.zeros_like(self.source_weights.displacement()))

    def prepare(self, source: Source | None) -> None:
        """Eq. 9."""
        if self.settings.fisher_weight == 0:
            return
        squares = [self._squared_gradient(images) for images in self._cut(self.require_source(source, "eta"))]
        if not squares:
            raise SettingError("source gave no batch: expected a list or a loader, not a generator that is used up")
        self.fisher = torch.stack(squares).mean(dim=0)

    def loss(self, out: Pass) -> Objective:
        """Eq. 8."""
        objective = super().loss(out)
        penalty = self.settings.fisher_weight * (self.fisher * self.source_weights.displacement().square()).sum()
        facts = objective.facts | {"penalty": penalty.detach()}
        return Objective(objective.value + penalty, objective.should_step, facts)

    def _cut(self, source: Source) -> Iterator[Tensor]:
        """Yield the first source images on the network's device, in batches that are not too large."""
        wanted = self.settings.fisher_samples
        for images, _ in source:
            for part in torch.split(images[:wanted], self.settings.fisher_batch):
                yield part.to(self.network.device, self.network.dtype)
            wanted -= len(images)
            if wanted <= 0:
                return

    @torch.enable_grad()
    def _squared_gradient(self, images: Tensor) -> Tensor:
        logits = self.network(images).logits
        loss = F.cross_entropy(logits, logits.argmax(dim=1))
        gradients = torch.autograd.grad(loss, self.source_weights.parameters, allow_unused=True, materialize_grads=True)
        return torch.cat([at_least_float32(gradient).reshape(-1) for gradient in gradients]).square()
