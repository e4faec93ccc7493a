"""TSD: pull features towards the prototypes that the classifier's own scores point at.

Wang et al., Feature Alignment and Uniformity for Test Time Adaptation, CVPR 2023.

    S_c = the K features of lowest entropy predicted as c so far, w_c = sum of s/|s| over S_c (a constant)
    q_i = softmax_c(<n(z_i), n(w_c)>)                     what the prototypes say, carries the gradient
    L   = (1/B) sum_i KL(q_i || r_i)                      r_i: what the classifier says, a constant

Updates: all parameters by Adam (the classifier gets no gradient from L), with batch statistics that also move the
running ones, so that the adapted network can be used by itself. Needs: a linear classifier. Output: the classifier's
logits from before the update. With several steps the batch enters the supports once, at the first.

`variant="released"` (default) is the code that the authors published and that made their numbers: n is the L1 norm, so
that all similarities are near 1/d, and r is the softmax of a softmax. Both make the gradient tiny and turn it another
way; Adam, which does not see its size, makes it matter. `variant="paper"` is the formula as written: n is the L2 norm
(cosine similarity), r = softmax of the logits. That is in effect another method, so it is not the default; use it with
SGD, which the released loss hardly moves.

Left out, as in the released code: the local clustering loss (its weight is 0 there) and the consistency filter.
Departures: filter_k=-1 keeps all supports, up to `capacity` (theirs drops the worst of every class at each batch); the
network stays in evaluation mode but for BatchNorm, so dropout is off.
"""

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from dpl.core.numerics import at_least_float32, full_precision
from dpl.core.settings import setting
from dpl.methods.base import GradientMethod, Objective
from dpl.methods.parts.norm_rules import BatchStatistics, TrackRunning
from dpl.methods.parts.supports import SupportSet, SupportSettings
from dpl.methods.registry import register
from dpl.methods.settings import GradientSettings
from dpl.network import Network, Pass
from dpl.network.norm_control import Rule

__all__ = ["TSD", "TSDSettings", "self_distillation"]


@dataclass(frozen=True, kw_only=True)
class TSDSettings(SupportSettings, GradientSettings, norm="batch", lr=1e-4, scope="all", filter_k=100):
    """Settings of TSD."""

    variant: Literal["released", "paper"] = setting(
        "released",
        "'released': L1-normalised similarities and a softmax of the softmax; 'paper': cosine and one softmax",
        choices=("released", "paper"),
    )


@register(
    "tsd",
    paper="Wang et al., Feature Alignment and Uniformity for Test Time Adaptation, CVPR 2023",
    updates="all parameters, running statistics and a support set of features",
    passes="1 forward, 1 backward",
    needs_classifier=True,
)
class TSD(GradientMethod[TSDSettings]):
    """Self-distillation from the classifier to the prototypes."""

    settings_class = TSDSettings
    supports: SupportSet

    def __init__(self, network: Network, settings: TSDSettings) -> None:
        super().__init__(network, settings)
        self.declare_part("supports", SupportSet(network, settings))

    def step(self, images: Tensor) -> Tensor:
        """Predict, add the batch to the supports, distil."""
        rule: Rule = TrackRunning() if isinstance(self.network.norm.rule, BatchStatistics) else self.network.norm.rule
        for i in range(self.settings.steps):
            with torch.enable_grad(), self.network.norm.using(rule):
                out = self.network(images)
                if i == 0:
                    self.supports.add(out)
                self.update(self.loss(out), out)
        return self.answer(images, out.logits)

    def loss(self, out: Pass) -> Objective:
        """Divergence of the prototypes' answer from the classifier's."""
        value = self_distillation(out.z, self.supports.sums, out.logits.detach(), self.settings.variant)
        return Objective(value, facts={"supports": self.supports.size})


@full_precision
def self_distillation(features: Tensor, prototypes: Tensor, logits: Tensor, variant: str) -> Tensor:
    """Return the mean KL divergence between softmaxed similarities [B, C] and the classifier's answer."""
    released = variant == "released"
    order = 1 if released else 2
    similarity = F.normalize(features, p=order, dim=1) @ F.normalize(at_least_float32(prototypes), p=order, dim=1).T
    target = at_least_float32(logits).softmax(dim=1) if released else at_least_float32(logits)
    log_q, log_r = similarity.log_softmax(dim=1), target.log_softmax(dim=1)
    return (log_q.exp() * (log_q - log_r)).sum(dim=1).mean()
