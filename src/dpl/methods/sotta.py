"""SoTTA: learn from a bank of confident, class-balanced samples with sharpness-aware steps, for streams with outliers.

Gong et al., SoTTA: Robust Test-Time Adaptation on Noisy Data Streams, NeurIPS 2023.

    bank:  samples with max p_i of at least p0; when it is full, one of a largest class gives way, at random
    L    = mean over the bank of -sum_c p_c log(p_c + 1e-6)
    step along the gradient of L at theta + rho grad L / |grad L|                        (sharpness-aware)

After every N images the bank is one batch: its own statistics normalise it, and the running ones move towards them at
both passes of the step. Updates: affine parameters of normalisation layers below the top (`frozen_modules`), and
running statistics. Needs: nothing. Output: from before the updates, with running statistics. `confidence` (p0) is the
authors' value for ten classes; they use 0.66 for CIFAR-100 and 0.33 for ImageNet.
Departures from the authors' code: no weight decay, as their scripts ask (a 0 on the command line is ignored there, so
that CIFAR runs have 5e-4); all images of a batch are predicted before any update; none is dropped at the end.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from dpl.core.numerics import at_least_float32
from dpl.core.settings import setting
from dpl.methods.base import Objective
from dpl.methods.parts.banked import MemoryBankSettings, ReservoirMethod
from dpl.methods.parts.norm_rules import TrackRunning
from dpl.methods.parts.sharpness import sharpness_aware
from dpl.methods.parts.top_layers import TOP_LAYERS
from dpl.methods.registry import register
from dpl.objectives import entropy_of_probabilities

__all__ = ["SoTTA", "SoTTASettings"]


@dataclass(frozen=True, kw_only=True)
class SoTTASettings(MemoryBankSettings):
    """Settings of SoTTA."""

    confidence: float = setting(0.99, "p0: samples at least this confident enter the bank", low=0, high=1)
    bn_momentum: float = setting(0.2, "share of the bank's statistics in the running ones at a pass", low=0, high=1)
    rho: float = setting(0.05, "how far the sharpness-aware step looks", low=0)
    temperature: float = setting(1.0, "of the predictions in the loss", low=1e-4)
    frozen_modules: tuple[str, ...] = setting(TOP_LAYERS, "modules whose parameters do not train")


@register(
    "sotta",
    paper="Gong et al., SoTTA: Robust Test-Time Adaptation on Noisy Data Streams, NeurIPS 2023",
    updates="affine parameters of normalisation layers below the top, and running statistics",
    passes="1 forward; every 64 images 2 forward and 2 backward over 64",
    host_reads=2,
)
class SoTTA(ReservoirMethod[SoTTASettings]):
    """A bank of confident samples and sharpness-aware steps."""

    settings_class = SoTTASettings

    def choose(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Let the confident samples in."""
        confidence, labels = at_least_float32(logits).softmax(dim=1).max(dim=1)
        offered = torch.where(confidence >= self.settings.confidence, labels, -1)
        draws = torch.rand(len(logits), 3, generator=self.random.generator)
        draws[:, 0] = 0  # a confident sample always enters
        return self.offer(offered, draws, logits.shape[1])

    def learn(self) -> None:
        """Take a sharpness-aware step on the whole bank."""
        samples = self.stored(self.occupied())
        if len(samples) == 0:
            self.facts = {"updated": False, "reason": "no sample was confident enough for the bank"}
            return
        rule = TrackRunning(momentum=self.settings.bn_momentum)
        for _ in range(self.settings.steps):
            with torch.enable_grad(), self.network.norm.using(rule):
                out = self.network(samples)
                loss = sharpness_aware(
                    list(self.trainable.values()),
                    self._entropy(out.logits),
                    lambda: self._entropy(self.network(samples).logits),
                    self.settings.rho,
                )
                self.update(Objective(loss), out)

    def _entropy(self, logits: Tensor) -> Tensor:
        p = (at_least_float32(logits) / self.settings.temperature).softmax(dim=1)
        return entropy_of_probabilities(p, 1e-6).mean()
