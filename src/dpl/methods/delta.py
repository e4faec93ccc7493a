"""DELTA: batch renormalisation, and a loss in which frequently predicted classes count less.

Zhao et al., DELTA: degradation-free fully test-time adaptation, ICLR 2023.

    TBR: each BatchNorm layer uses moving averages of the stream's statistics, but the gradient of the batch's own
         (`norm="renorm"`, dpl.methods.parts.norm_rules)
    DOT: w_i proportional to 1 / m[argmax p_i], with mean 1 over the batch; then m <- 0.95 m + 0.05 mean_i p_i
    L    = mean over the selected of w_i l_i

with l_i one of
    "entropy"       H_i, of all samples
    "weighted"      exp(E0 - H_i) H_i of the samples with H_i < E0 = 0.5 ln C; no gradient through the weight
    "pseudo_label"  cross-entropy with argmax p_i, of the samples with max p_i > 0.4

m starts uniform. Both parts help other methods as well: TBR is a value of `norm` for all of them, and `norm="batch"`
or `momentum=1` leaves one of the parts out here. Updates: affine parameters of normalisation layers. Needs: such
layers. Output: from before the update. SGD with 2.5e-4 is the authors' choice for ImageNet.
Departures from the authors' code: `predict` does not move the averages (theirs move at every forward pass);
`reset` and snapshots include them.
"""

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from dpl.core.numerics import at_least_float32
from dpl.core.settings import setting
from dpl.methods.base import GradientMethod, Objective
from dpl.methods.parts.norm_rules import BatchRenormalisation
from dpl.methods.registry import register
from dpl.methods.settings import GradientSettings
from dpl.network import Network, Pass
from dpl.objectives import entropy, entropy_margin, masked_mean

__all__ = ["DELTA", "DELTASettings"]


@dataclass(frozen=True, kw_only=True)
class DELTASettings(GradientSettings, norm="renorm", optimizer="sgd", lr=2.5e-4):
    """Settings of DELTA."""

    norm_momentum: float = setting(0.95, "share of the old statistics that stays", low=0, high=1)
    momentum: float = setting(0.95, "share of the old average prediction that stays; 1: no re-weighting", low=0, high=1)
    objective: Literal["entropy", "weighted", "pseudo_label"] = setting("entropy", "the loss of a sample")
    margin: float = setting(0.5, "'weighted': E0 as a share of ln C", low=0)
    confidence: float = setting(0.4, "'pseudo_label': use samples above this probability", low=0, high=1)


@register(
    "delta",
    paper="Zhao et al., DELTA: degradation-free fully test-time adaptation, ICLR 2023",
    updates="affine parameters of normalisation layers",
    passes="1 forward, 1 backward",
)
class DELTA(GradientMethod[DELTASettings]):
    """Batch renormalisation and class re-weighting."""

    settings_class = DELTASettings
    average: Tensor | None  # m, [C]; uniform at first

    def __init__(self, network: Network, settings: DELTASettings) -> None:
        super().__init__(network, settings)
        if isinstance(network.norm.rule, BatchRenormalisation):
            network.norm.rule.momentum = settings.norm_momentum
        self.declare(average=None)

    def candidates(self, out: Pass) -> Tensor | None:
        """The samples that the loss selects."""
        if self.settings.objective == "entropy":
            return None
        if self.settings.objective == "weighted":
            return entropy(out.reference) < entropy_margin(out.reference, self.settings.margin)
        return out.probabilities.max(dim=1).values > self.settings.confidence

    def loss(self, out: Pass) -> Objective:
        """L."""
        chosen = self.candidates(out)
        selected = torch.ones(len(out.logits), dtype=torch.bool, device=out.logits.device) if chosen is None else chosen
        value = masked_mean(self._class_weights(out) * self._losses(out), selected)
        return Objective(value, selected.any(), {"selected": out.share(selected)})

    def _losses(self, out: Pass) -> Tensor:
        if self.settings.objective == "pseudo_label":
            return F.cross_entropy(at_least_float32(out.logits), out.reference.argmax(dim=1), reduction="none")
        if self.settings.objective == "entropy":
            return entropy(out.logits)
        margin = entropy_margin(out.reference, self.settings.margin)
        return (margin - entropy(out.reference)).exp() * entropy(out.logits)

    def _class_weights(self, out: Pass) -> Tensor:
        """Return w, and let the average prediction follow."""
        p = at_least_float32(out.whole).softmax(dim=1)
        average = torch.full_like(p[0], 1 / p.shape[1]) if self.average is None else self.average
        rarity = 1 / average.clamp(min=torch.finfo(average.dtype).eps)
        moved = torch.lerp(p.mean(dim=0), average, self.settings.momentum)
        self.average = torch.where(moved.isfinite().all(), moved, average)
        return rarity[out.reference.argmax(dim=1)] / rarity[out.whole.argmax(dim=1)].mean()
