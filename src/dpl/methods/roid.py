"""ROID: certainty- and diversity-weighted soft likelihood ratios, held near the source, with prior correction.

Marsden, Döbler, Yang, Universal Test-time Adaptation through Weight Ensembling, Diversity Weighting, and Prior
Correction, WACV 2024.

    d_i = minmax(1 - cos(m, p_i)),  c_i = minmax(-H_i),  m = moving average of the predictions
    w_i = exp(d_i c_i / tau) where d_i is at least the batch's mean, else 0
    L   = (1/B) sum_i w_i (SLR(z_i) + SCE(z'_i, z_i)),  z' the logits of augmented views
    after each step: theta <- 0.99 theta + 0.01 theta0
    prior: pi = mean_i p_i, smoothed to (pi + g) / (1 + g C) with g = max(1/B, 1/C) / max pi

Updates: affine parameters of normalisation layers, with batch statistics. Needs: such layers. Output: from before the
update, corrected by the prior. The views of the samples with a weight are normalised by their own statistics, and
gradients flow through both sides of SCE, as in the authors' code.

The prior comes in as the authors' code has it (`prior="logits"`): the logits are multiplied by it. A shift of the
class prior changes the posterior instead, p(y|x) pi(y), which is `prior="posterior"` (log pi added to the logits): then
softmax of the output is a probability again, whereas multiplied logits are flat, and negative ones rise as their
class becomes rare.
Departures: B is the batch's own size (the authors divide a short last batch by the configured size); equal scores,
as in a batch of one, get weight 1 (the authors' min-max divides 0 by 0 and never recovers).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from dpl.core.numerics import at_least_float32
from dpl.core.settings import setting
from dpl.methods.base import GradientMethod, Objective
from dpl.methods.parts.source_weights import SourceWeights
from dpl.methods.registry import register
from dpl.methods.settings import GradientSettings
from dpl.network import Network, Pass
from dpl.objectives import entropy, min_max, similarity_to, soft_likelihood_ratio
from dpl.objectives.consistency import symmetric_cross_entropy
from dpl.views import roid_view

__all__ = ["ROID", "ROIDSettings"]


@dataclass(frozen=True, kw_only=True)
class ROIDSettings(GradientSettings, norm="batch"):
    """Settings of ROID."""

    temperature: float = setting(1 / 3, "tau: the smaller, the more weights differ", low=1e-4)
    momentum: float = setting(0.9, "share of the old average prediction that stays", low=0, high=1)
    weight_momentum: float = setting(
        0.99, "share of the adapted weights in the ensemble with the source's", low=0, high=1, formerly="keep"
    )
    consistency: bool = setting(True, "add the agreement with augmented views (a second pass)")
    augment: Callable[[Tensor], Tensor] | None = setting(None, "makes the views; None: the authors' recipe")
    prior: Literal["logits", "posterior", "off"] = setting(
        "logits", "what the smoothed class prior multiplies", choices=("logits", "posterior", "off")
    )


@register(
    "roid",
    paper="Marsden et al., Universal Test-time Adaptation through Weight Ensembling, Diversity Weighting, and Prior "
    "Correction, WACV 2024",
    updates="affine parameters of normalisation layers",
    passes="2 forward, 2 backward",
    views=True,
    host_reads=1,
)
class ROID(GradientMethod[ROIDSettings]):
    """Weighted likelihood ratios and consistency, ensembled with the source."""

    settings_class = ROIDSettings
    average: Tensor | None  # m, [C]; uniform at first
    source_weights: SourceWeights

    def __init__(self, network: Network, settings: ROIDSettings) -> None:
        super().__init__(network, settings)
        self.declare_part("source_weights", SourceWeights(self.trainable))
        self.declare(average=None)
        if settings.prior != "off":
            self.no_export = "it corrects the predictions of a batch by the class shares in it (prior='off' does not)"
        self.augment = settings.augment or roid_view(per_sample=False)

    def loss(self, out: Pass) -> Objective:
        """L."""
        weights = self._weights(out)
        total = (weights * soft_likelihood_ratio(out.logits)).sum()
        if self.settings.consistency:
            total = total + self._inconsistency(out, weights)
        return Objective(total / len(weights), None, {"selected": (weights > 0).float().mean()})

    def update(self, objective: Objective, out: Pass) -> None:
        """Step, then average the weights."""
        super().update(objective, out)
        self.ensemble()

    def ensemble(self) -> None:
        """Average with the source."""
        self.source_weights.pull(1 - self.settings.weight_momentum)

    def answer(self, images: Tensor, logits: Tensor) -> Tensor:
        """Correct by the batch's prior."""
        return self.predict(images) if self.settings.output == "after" else self._corrected(logits.detach())

    def predict(self, images: Tensor) -> Tensor:
        """Predict a batch, corrected by its prior, and change nothing."""
        return self._corrected(super().predict(images))

    @torch.no_grad()
    def _weights(self, out: Pass) -> Tensor:
        """Return w, and let the average prediction follow."""
        p = out.probabilities
        average = torch.full_like(p[0], 1 / p.shape[1]) if self.average is None else self.average
        diversity, certainty = min_max(1 - similarity_to(average, p)), min_max(-entropy(out.logits))
        moved = self.settings.momentum * average + (1 - self.settings.momentum) * p.mean(dim=0)
        self.average = torch.where(moved.isfinite().all(), moved, average)
        weights = (diversity * certainty / self.settings.temperature).exp()
        return torch.where(diversity < diversity.mean(), 0, weights)

    def _inconsistency(self, out: Pass, weights: Tensor) -> Tensor:
        # The rows must be known on the host: batch statistics are those of the views of weighted samples alone.
        rows = (weights > 0).nonzero().flatten()
        views = self.network(self.view(out.images[rows]))
        return (weights[rows] * symmetric_cross_entropy(views.logits, out.logits[rows])).sum()

    def _corrected(self, logits: Tensor) -> Tensor:
        if self.settings.prior == "off":
            return logits
        precise = at_least_float32(logits)
        batch, classes = logits.shape
        prior = precise.softmax(dim=1).mean(dim=0)
        smooth = max(1 / batch, 1 / classes) / prior.max()
        prior = (prior + smooth) / (1 + smooth * classes)
        return (precise * prior if self.settings.prior == "logits" else precise + prior.log()).to(logits.dtype)
