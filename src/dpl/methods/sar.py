"""SAR: sharpness-aware entropy minimisation on reliable samples, with recovery from collapse.

Niu et al., Towards Stable Test-Time Adaptation in Dynamic Wild World, ICLR 2023.

    L(theta) = mean over {i : H_i < E0} of H_i,  E0 = 0.4 ln C                                    (Eq. 2)
    eps      = rho grad L / |grad L|;  step along the gradient of L at theta + eps, where of the reliable only
               those count that still are                                                         (Eq. 3, 4)
    moving average of that loss < e_m: return to the source                                       (Section 4)

Updates: affine parameters of normalisation layers below the top (`top`), with batch statistics. Needs: such layers.
Output: the first pass's, from before the update. e_m = 0.2 is meant for 1000 classes; with ten, a good model's loss
is often below it, and SAR keeps returning to the source. `objective="come"` puts COME's uncertainty (dpl.methods.come)
in place of H. An added loss (`sar+dpl`) takes part in both passes, and its memory learns from the second alone. The
learning rate is the RMT library's for CIFAR; for ImageNet it is 2.5e-4.
Departures, undone by `authors`: a return to the source also forgets the momentum and the average ("rmt" keeps the
momentum, as the RMT library does; "official" also keeps the low average, so that the next batches return as
well), and a batch without a reliable sample changes nothing (in theirs the momentum still moves the weights). The
modules named in `top` are looked for inside wrappers, and in no other place.
"""

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from dpl.core.settings import setting
from dpl.methods.base import GradientMethod, Objective
from dpl.methods.parts.sharpness import ascended
from dpl.methods.parts.source_weights import SourceWeights, restart
from dpl.methods.parts.top_layers import TOP_LAYERS
from dpl.methods.parts.uncertainty import UncertaintySettings
from dpl.methods.registry import register
from dpl.network import Network, Pass
from dpl.objectives import entropy_margin, masked_mean

__all__ = ["SAR", "SARSettings"]


@dataclass(frozen=True, kw_only=True)
class SARSettings(UncertaintySettings, norm="batch", optimizer="sgd"):
    """Settings of SAR."""

    margin: float = setting(0.4, "E0 as a share of ln C: samples with less entropy are reliable", low=0)
    rho: float = setting(0.05, "how far the sharpness-aware step looks", low=0)
    recovery: float = setting(0.2, "e_m: with an average loss below it the source returns; 0: never", low=0)
    momentum: float = setting(0.9, "share of the old average loss that stays", low=0, high=1)
    frozen_modules: tuple[str, ...] = setting(TOP_LAYERS, "modules whose parameters do not train", formerly="top")
    authors: Literal["no", "rmt", "official"] = setting(
        "no", "keep what the RMT library or the authors keep at a recovery", choices=("no", "rmt", "official")
    )


@register(
    "sar",
    paper="Niu et al., Towards Stable Test-Time Adaptation in Dynamic Wild World, ICLR 2023",
    updates="affine parameters of normalisation layers below the top",
    passes="2 forward, 2 backward",
    host_reads=1,
)
class SAR(GradientMethod[SARSettings]):
    """Sharpness-aware and reliable entropy minimisation."""

    settings_class = SARSettings
    average: Tensor | None  # of the second pass's loss
    source_weights: SourceWeights

    def __init__(self, network: Network, settings: SARSettings) -> None:
        super().__init__(network, settings)
        self.declare_part("source_weights", SourceWeights(self.trainable))
        self.declare(average=None)

    def step(self, images: Tensor) -> Tensor:
        """Predict, ascend, step, recover if need be: `steps` times."""
        for _ in range(self.settings.steps):
            with torch.enable_grad():
                logits = self._sharpness_aware_update(images)
            self._recover()
        return self.answer(images, logits)

    def _sharpness_aware_update(self, images: Tensor) -> Tensor:
        out = self.forward(images)
        reliable = self.candidates(out)
        before = [term.state() for term in self.terms]
        first = self.with_terms(self._entropy_loss(out, reliable), out)
        with ascended(self.source_weights.parameters, first.value, self.settings.rho):
            again = replace(self.network(out.images), whole=out.whole, maps=out.maps, statistics=out.statistics)
            still = reliable & self.candidates(again)
            for term, state in zip(self.terms, before, strict=True):
                term.restore(state)  # one batch counts once
            own = self._entropy_loss(again, still)
            second = self.with_terms(own, again)
            self.optimizer.optimizer.zero_grad()
            second.value.backward()  # type: ignore[no-untyped-call]
        average, low = self._followed(own.value.detach(), still)
        should_step = self._is_worth_a_step(second, first.value.detach())
        self.facts = {"loss": second.value.detach(), **second.facts}
        self.facts |= {"reliable": out.share(reliable), "selected": out.share(still)}
        share = self.share
        if out.candidates is not None and images.device.type == "cpu":
            share = int(out.candidates.sum()) / len(out.whole)
        # The one read of a step: a return to the source is decided on the host.
        updated, selected, self.facts["recovered"] = torch.stack([should_step, still.any(), low]).tolist()
        self.facts["updated"] = updated
        if selected:
            self.average = average
        if updated:
            self.share = share
            self.optimizer.apply()
        return out.whole

    def candidates(self, out: Pass) -> Tensor:
        """The reliable samples."""
        return self.settings.uncertainty(out.reference) < entropy_margin(out.reference, self.settings.margin)

    def _entropy_loss(self, out: Pass, reliable: Tensor) -> Objective:
        """Eq. 2, over the reliable samples."""
        return Objective(masked_mean(self.settings.uncertainty(out.logits), reliable), reliable.any())

    def _is_worth_a_step(self, second: Objective, first: Tensor) -> Tensor:
        should_step = second.value.detach().isfinite() & first.isfinite()
        if second.should_step is not None and self.settings.authors == "no":
            should_step = should_step & second.should_step
        return should_step & self.optimizer.gradients_are_finite()

    def _followed(self, loss: Tensor, selected: Tensor) -> tuple[Tensor, Tensor]:
        """Return the average with this loss, and whether the average is too low after the batch."""
        momentum, before = self.settings.momentum, self.average
        average = loss if before is None else momentum * before + (1 - momentum) * loss
        kept = torch.full_like(loss, torch.inf) if before is None else before
        return average, torch.where(selected.any(), average, kept) < self.settings.recovery

    def _recover(self) -> None:
        """Return to the source if the loss has become suspiciously small."""
        if self.facts["recovered"]:
            restart(self, self.source_weights, optimizer=self.settings.authors == "no")
            if self.settings.authors != "official":
                self.average = None
