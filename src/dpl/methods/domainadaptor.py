"""DomainAdaptor: mix source and batch statistics layer by layer, then one step on a generalised entropy.

Zhang, Qi, Shi, Gao, DomainAdaptor: A Novel Approach to Test-time Adaptation, ICCV 2023.

AdaMixBN, for each BatchNorm layer and batch (s source, t batch, i one sample; D compares means and deviations):

    lambda = mean_i [1 - D(t, s) / (D(t, s) + D(i, s) + D(i, t))],
    mu = lambda mu_s + (1 - lambda) mu_t,    var = lambda var_s + (1 - lambda) var_t,

carried over to the affine parameters, so that the step acts on the rectified ones (see `parts.adamix`). Losses,
with h the centred logits and T = 2 std(h), both of each sample:

    gem-t:   T² H(softmax(h / T))          gem-skd:   T² CE(softmax(h), softmax(h / T))          em:   H(softmax(h))

Updates: affine parameters of normalisation layers, for one batch only: the next starts from the source again. Needs:
BatchNorm layers. Output: from after the update, by a second pass over the same batch. `predict` mixes the statistics
of its images and takes no step.

`online=True` carries the updates on from batch to batch. Departures, undone by `authors=True`: (1) online, what is
carried is the update alone and each batch is rectified once; the authors' code keeps the rectified parameters and
rectifies them again with each batch, which collapses after a few (they say that AdaMixBN is not meant for it). (2) Each
sample is weighted by its own T²; the authors' code multiplies [B] by [B, 1], which weights all samples by the batch's
mean T². Their optimizer is SGD with momentum 0.9 online and without it otherwise, which is the same here: momentum
starts anew with each batch that is adapted to by itself. Their variant gem-aug (labels from augmented views) is left
out.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from dpl.core.settings import setting
from dpl.methods.base import GradientMethod, Objective
from dpl.methods.parts.adamix import AdaMix
from dpl.methods.registry import register
from dpl.methods.settings import GradientSettings
from dpl.network import Pass
from dpl.objectives import entropy, gem_skd, gem_t

__all__ = ["DomainAdaptor", "DomainAdaptorSettings"]

_LOSSES = ("gem-t", "gem-skd", "em")


@dataclass(frozen=True, kw_only=True)
class DomainAdaptorSettings(GradientSettings, optimizer="sgd", output="after"):
    """Settings of DomainAdaptor."""

    norm: str | float = setting(
        "running", "source statistics, which AdaMixBN mixes with the batch's: nothing else", choices=("running",)
    )
    objective: Literal["gem-t", "gem-skd", "em"] = setting("gem-t", "the loss", choices=_LOSSES)
    online: bool = setting(False, "carry the updates on to the next batch")
    authors: bool = setting(
        False, "as the authors' code: the batch's mean T² for all; online, rectify the rectified parameters again"
    )


@register(
    "domainadaptor",
    paper="Zhang et al., DomainAdaptor: A Novel Approach to Test-time Adaptation, ICCV 2023",
    updates="affine parameters of normalisation layers, anew for each batch",
    passes="2 forwards, 1 backward",
    needs_norm=True,
)
class DomainAdaptor(GradientMethod[DomainAdaptorSettings]):
    """Adaptively mixed statistics and generalised entropy."""

    settings_class = DomainAdaptorSettings
    no_export = "each layer mixes the source's statistics anew with those of every batch"
    predicts_jointly = True

    def loss(self, out: Pass) -> Objective:
        """Mean generalised entropy."""
        if self.settings.objective == "em":
            return Objective(entropy(out.logits).mean())
        generalised = gem_t if self.settings.objective == "gem-t" else gem_skd
        return Objective(generalised(out.logits, shared_weight=self.settings.authors).mean())

    def step(self, images: Tensor) -> Tensor:
        """Mix the statistics, update, predict; then forget, unless online."""
        rule = AdaMix()
        with self._for_one_batch(), self.network.norm.using(rule):
            logits = super().step(images)
        if self.settings.online and self.settings.authors:
            rule.fold()
        return logits

    def answer(self, images: Tensor, logits: Tensor) -> Tensor:
        """Predict once more with the rectification found in the first pass."""
        return super().predict(images) if self.settings.output == "after" else logits.detach()

    @torch.no_grad()
    def predict(self, images: Tensor) -> Tensor:
        """Predict with mixed statistics of these images."""
        with self.network.norm.using(AdaMix()):
            return super().predict(images)

    @contextmanager
    def _for_one_batch(self) -> Iterator[None]:
        """Undo all updates at the end, unless online."""
        if self.settings.online:
            yield
            return
        before = [(parameter, parameter.detach().clone()) for parameter in self.trainable.values()]
        try:
            yield
        finally:
            with torch.no_grad():
                for parameter, value in before:
                    parameter.copy_(value)
            self.optimizer.restore({})
