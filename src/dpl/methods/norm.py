"""NORM: replace the source's BatchNorm statistics by those of the target.

Schneider et al., Improving robustness against common corruptions by covariate shift adaptation, NeurIPS 2020;
Nado et al., Evaluating Prediction-Time Batch Normalization, 2020; Li et al., Adaptive Batch Normalization, 2018.

Updates: nothing is trained. `norm="batch"` uses each batch's own statistics ("BN-1"), a number a blends
(1 - a) source + a batch ("BN-alpha"; the batch variance is unbiased as the running one is), and `ema=True` lets the
running statistics follow the stream and predicts with them ("BN-EMA": one pass in training mode, a second one
with the statistics it left). Needs: BatchNorm layers. Output: the only forward's (the second one's with `ema`).
Departure: `norm="batch"` leaves the running buffers alone; the benchmark libraries let them drift unused, which
`authors=True` reproduces.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from dpl.core.settings import setting
from dpl.methods.base import Method
from dpl.methods.parts.norm_rules import RunningStatistics, TrackRunning
from dpl.methods.registry import register
from dpl.methods.settings import Settings
from dpl.network import Network

__all__ = ["Norm", "NormSettings"]


@dataclass(frozen=True, kw_only=True)
class NormSettings(Settings, norm="batch"):
    """Settings of NORM."""

    ema: bool = setting(False, "let the running statistics follow the stream and predict with them")
    authors: bool = setting(False, "update the running buffers although they are not used")


@register(
    "norm",
    paper="Schneider et al., Improving robustness against common corruptions, NeurIPS 2020",
    updates="nothing (BatchNorm statistics are the batch's)",
    passes="1 forward",
    needs_norm=True,
)
class Norm(Method[NormSettings]):
    """Predict with the target's statistics."""

    settings_class = NormSettings

    def __init__(self, network: Network, settings: NormSettings) -> None:
        super().__init__(network, settings)
        if settings.ema:
            network.norm.rule = RunningStatistics()

    @torch.no_grad()
    def step(self, images: Tensor) -> Tensor:
        """Predict; with `ema` the running statistics move first."""
        self.facts = {"updated": self.settings.ema or self.settings.authors}
        if not (self.settings.ema or self.settings.authors):
            self.facts["reason"] = "nothing is trained; statistics are taken from each batch"
            return self.predict(images)
        with self.network.norm.using(TrackRunning()):
            logits = self.network(images).logits
        return self.predict(images) if self.settings.ema else logits
