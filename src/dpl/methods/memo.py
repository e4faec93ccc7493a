"""MEMO: adapt to one image by making the average prediction of its augmented views certain.

Zhang, Levine, Finn, MEMO: Test Time Robustness via Adaptation and Augmentation, NeurIPS 2022. For each image alone:

    p = (1/B) sum_b softmax(f(x~_b)) over B views,    L = H(p)

One step on L from the source weights, a prediction of the image itself, and the weights are the source's again:
nothing is carried to the next image. `norm` is "running" as in the authors' CIFAR script. A number a blends a share a
of the views' (then of the image's) statistics into the running ones, without gradient through them; their ImageNet
script has a = 1/17. They use 64 views and a learning rate of 2.5e-4 there. Updates: all parameters, for one image
only. Needs: images in [0, 1] for the views. Output: from after the update, by a pass over the image alone.
Departures from the authors' code: the views continue the border where theirs fill with one colour; AdamW's moments
start over with each image (theirs carry over although the weights do not); SGD has momentum, which shows with `steps`
above 1.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dpl.core.numerics import at_least_float32
from dpl.core.settings import setting
from dpl.methods.base import GradientMethod, Objective
from dpl.methods.parts.norm_rules import BlendedStatistics, RecordedStatistics, blend
from dpl.methods.parts.source_weights import SourceWeights
from dpl.methods.registry import register
from dpl.methods.settings import GradientSettings
from dpl.network import Network, Pass
from dpl.network.norm_control import BatchRule, Forward, NormControl, channel_statistics
from dpl.views import memo_view

__all__ = ["MEMO", "BlendedConstants", "MEMOSettings"]


@dataclass(frozen=True, kw_only=True)
class MEMOSettings(GradientSettings, scope="all", optimizer="sgd", lr=5e-3, output="after"):
    """Settings of MEMO; the authors' for CIFAR."""

    views: int = setting(32, "B: augmented views of each image", low=1)
    augment: Callable[[Tensor], Tensor] | None = setting(None, "random view of a batch; the authors' when not given")


@dataclass(frozen=True)
class BlendedConstants(BatchRule):
    """Blended statistics through which no gradient flows."""

    share: float
    needs_running = True

    def normalise(self, layer: Any, forward: Forward, x: Tensor, control: NormControl) -> Tensor:
        """Normalise by the blend."""
        with torch.no_grad():
            blended = blend((layer.running_mean, layer.running_var), channel_statistics(x, correction=1), self.share)
        return RecordedStatistics({layer: blended})(layer, forward, x, control)


@register(
    "memo",
    paper="Zhang et al., MEMO: Test Time Robustness via Adaptation and Augmentation, NeurIPS 2022",
    updates="all parameters, for one image at a time",
    passes="33 forward and 32 backward for each image",
    views=True,
)
class MEMO(GradientMethod[MEMOSettings]):
    """Marginal entropy minimisation with one test point."""

    settings_class = MEMOSettings
    source_weights: SourceWeights

    def __init__(self, network: Network, settings: MEMOSettings) -> None:
        super().__init__(network, settings)
        if isinstance(network.norm.rule, BlendedStatistics) and isinstance(settings.norm, float):
            network.norm.rule = BlendedConstants(settings.norm)
        self.augment = settings.augment or memo_view()
        self.declare_part("source_weights", SourceWeights(self.trainable))

    def step(self, images: Tensor) -> Tensor:
        """Adapt to each image, predict it, and forget."""
        logits, losses, updated = [], [], []
        for image in torch.split(images, 1):
            try:
                logits.append(self._adapted(image))
            finally:
                self.source_weights.put_back()
                self.optimizer.restore({})
            losses.append(torch.as_tensor(self.facts["loss"]))
            updated.append(torch.as_tensor(self.facts["updated"]))
        self.facts |= {"loss": torch.stack(losses).mean(), "updated": torch.stack(updated).any()}
        return torch.cat(logits)

    def _adapted(self, image: Tensor) -> Tensor:
        """Return the prediction of one image [1, ...] after the steps on its views."""
        before = self.predict(image) if self.settings.output == "before" else image
        repeated = image.expand(self.settings.views, *image.shape[1:])
        views = self.view(repeated)
        for _ in range(self.settings.steps):
            with torch.enable_grad():
                out = self.network(views)
                self.update(self.loss(out), out)
        return self.answer(image, before)

    def loss(self, out: Pass) -> Objective:
        """H of the average prediction."""
        log_p = at_least_float32(out.logits).log_softmax(dim=1).logsumexp(dim=0) - math.log(len(out.logits))
        return Objective(-(log_p.exp() * log_p).sum())

    @torch.no_grad()
    def predict(self, images: Tensor) -> Tensor:
        """Predict each image by itself, whatever statistics are used."""
        with self.network.norm.using(groups=len(images)):
            return super().predict(images)
