"""CoTTA: a student follows the prediction of its own moving average, averaged over augmented views.

Wang, Fink, Van Gool, Dai, Continual Test-Time Domain Adaptation, CVPR 2022. With student f, teacher f', source f0:

    z' = f'(x)                                  where mean_i max softmax f0(x_i) reaches the threshold
    z' = mean over N views of f'(view_k(x))     elsewhere (logits are averaged)
    L  = -(1/B) sum_i softmax(z'_i) log softmax(f(x_i))
    f' <- m f' + (1 - m) f;    then each single weight of f returns to f0 with probability r

Updates: all parameters, with batch statistics. Needs: nothing; images in [0, 1] for the views. Output: z', from before
the update; `predict` and `output="after"` give f'(x).
Settings are the authors' for CIFAR-10-C: threshold 0.92 (CIFAR-100-C 0.72). For ImageNet-C and DomainNet-126 the
benchmark library has threshold 0.1, restore 0.001, lr 0.01 with optimizer="nesterov" and loss="symmetric", which it
chooses by the data set's name. Departures from its code: views have factors of their own for each image (theirs, one
for a batch: `augment=dpl.views.cotta_view(per_sample=False)`) and run together; parameters of any name train and are
restored (theirs: those called weight or bias); f0 is a set of weights in the student's layers, not a third network.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.func import functional_call

from dpl.core.numerics import at_least_float32
from dpl.core.settings import setting
from dpl.memory.ema import restore_randomly
from dpl.methods.base import Fact, GradientMethod, Objective
from dpl.methods.parts.source_weights import SourceWeights
from dpl.methods.parts.teacher import AnsweredByTeacher, Teacher
from dpl.methods.registry import register
from dpl.methods.settings import GradientSettings
from dpl.network import Network
from dpl.network.split import logits_of
from dpl.objectives.consistency import soft_cross_entropy, symmetric_cross_entropy
from dpl.views import cotta_view

__all__ = ["CoTTA", "CoTTASettings"]

_AT_ONCE = 256
_LOSSES = {"cross_entropy": soft_cross_entropy, "symmetric": symmetric_cross_entropy}


@dataclass(frozen=True, kw_only=True)
class CoTTASettings(GradientSettings, norm="batch", scope="all"):
    """Settings of CoTTA."""

    momentum: float = setting(0.999, "m: share of the teacher that stays at each step", low=0, high=1)
    restore: float = setting(0.01, "r: probability with which a weight returns to its source value", low=0, high=1)
    threshold: float = setting(0.92, "views are averaged where the source is less confident", low=0, high=1)
    views: int = setting(32, "N: augmented views to average", low=1)
    loss: Literal["cross_entropy", "symmetric"] = setting(
        "cross_entropy", "what draws the student to the teacher", choices=tuple(_LOSSES)
    )
    augment: Callable[[Tensor], Tensor] | None = setting(None, "random view of a batch; the authors' when not given")
    views_per_pass: int | None = setting(
        None,
        "augmented images that run through the teacher at once; by default 256 on a GPU, one view on a CPU",
        low=1,
        formerly="together",
    )


@register(
    "cotta",
    paper="Wang et al., Continual Test-Time Domain Adaptation, CVPR 2022",
    updates="all parameters",
    passes="3 forward (34 where the source is unsure), 1 backward",
    views=True,
    host_reads=1,
)
class CoTTA(AnsweredByTeacher, GradientMethod[CoTTASettings]):
    """A view-averaged teacher and stochastic restoring."""

    settings_class = CoTTASettings
    source: SourceWeights

    def __init__(self, network: Network, settings: CoTTASettings) -> None:
        super().__init__(network, settings)
        self.augment = settings.augment or cotta_view()
        self.declare_part("source", SourceWeights(self.trainable))
        self.declare_part("teacher", Teacher(network, settings.momentum))

    def step(self, images: Tensor) -> Tensor:
        """Ask the teacher, teach the student, let the teacher follow, restore."""
        for _ in range(self.settings.steps):
            target, facts = self.teach(images)
            with torch.enable_grad():
                out = self.network(images)
                loss = _LOSSES[self.settings.loss](out.logits, target).mean()
                self.update(Objective(loss, facts=facts), out)
            self.teacher.follow()
            restore_randomly(self.source.parameters, self.source.values, self.settings.restore, self.random.generator)
        return self.answer(images, target)

    @torch.no_grad()
    def teach(self, images: Tensor) -> tuple[Tensor, dict[str, Fact]]:
        """Return the teacher's logits, averaged over views where the source is unsure, and why."""
        confidence = self.source_confidence(images)
        # Read on the host: the answer saves (or costs) N - 1 forward passes, far more than waiting for it.
        unsure = bool(confidence < self.settings.threshold)
        logits = self.averaged(images) if unsure else self.predict(images)
        return logits, {"source_confidence": confidence, "averaged": unsure}

    def source_confidence(self, images: Tensor) -> Tensor:
        """Return the mean top probability of the source network: the student's modules with the source's weights."""
        logits = logits_of(functional_call(self.network.module, self.source.named(), (images,)))
        return at_least_float32(logits).softmax(dim=1).amax(dim=1).mean()

    def averaged(self, images: Tensor) -> Tensor:
        """Return the teacher's mean logits over the views; several run as one batch, each with its own statistics."""
        # A GPU wants large batches; on a CPU they fall out of its caches (a twelfth slower, twice the memory).
        per_pass = self.settings.views_per_pass or (1 if images.device.type == "cpu" else _AT_ONCE)
        at_once = max(1, per_pass // len(images))
        total = torch.zeros((), device=images.device)
        for first in range(0, self.settings.views, at_once):
            count = min(at_once, self.settings.views - first)
            views = torch.cat([self.view(images) for _ in range(count)])
            with self.teacher.network.norm.using(groups=count):
                total = total + self.teacher(views).logits.view(count, len(images), -1).sum(dim=0)
        return total / self.settings.views
