"""RMT: a robust mean teacher with symmetric cross-entropy, contrast with source prototypes, and source replay.

Döbler, Marsden, Yang, Robust Mean Teacher for Continual and Gradual Test-Time Adaptation, CVPR 2023. With student f,
teacher f' <- m f' + (1 - m) f, an augmented view x~ of the batch, and symmetric cross-entropy SCE:

    L = 1/2 mean [SCE(f(x), f'(x)) + SCE(f(x~), f'(x))]
      + contrast of the three views {nearest source prototype, z, z~} of each sample, projected
      + CE(f(x_s), y_s) on the next source batch

Updates: all parameters and a projector, with batch statistics. Needs: a linear classifier, and labelled source
batches: once for the prototypes (mean feature of each class) and the warm-up, then one at each step (not with
`source_weight=0`). The warm-up trains student and teacher to agree on the source while the learning rate grows; its
result is what `reset` returns to. Output: f(x) + f'(x), logits from before the update.
Departures from the authors' code: parameters of any name train (theirs: those called weight or bias); a class
without source images is never the nearest (theirs turns everything into NaN); the optimizer's state after the
warm-up is restored exactly at every reset (theirs at the first only).
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn import Parameter

from dpl.core.settings import setting
from dpl.methods.base import Fact, GradientMethod, Objective, Source
from dpl.methods.parts.projector import declare_projector, nearest_contrast
from dpl.methods.parts.source_data import SourceStream, class_means
from dpl.methods.parts.teacher import Teacher
from dpl.methods.registry import register
from dpl.methods.settings import GradientSettings
from dpl.network import Network, Pass
from dpl.objectives.consistency import symmetric_cross_entropy
from dpl.views import rmt_view

__all__ = ["RMT", "RMTSettings"]


@dataclass(frozen=True, kw_only=True)
class RMTSettings(GradientSettings, norm="batch", scope="all"):
    """Settings of RMT; the authors' for CIFAR. On ImageNet-C and DomainNet-126: optimizer="nesterov", lr=1e-2."""

    momentum: float = setting(0.999, "share of the teacher that stays at each step", low=0, high=1)
    temperature: float = setting(0.1, "tau of the contrast", low=1e-4)
    projection: int = setting(128, "width of the projector; 0: none (DomainNet-126)", low=0)
    target_weight: float = setting(1.0, "weight of the agreement with the teacher", low=0)
    contrast_weight: float = setting(1.0, "weight of the contrast", low=0)
    source_weight: float = setting(1.0, "weight of the loss on source batches; 0: none are read at a step", low=0)
    warmup_samples: int = setting(50_000, "source images to warm up on; 0: no warm-up", low=0)
    prototype_samples: int = setting(100_000, "source images after which the prototypes are ready", low=1)
    augment: Callable[[Tensor], Tensor] | None = setting(None, "view of a batch; the authors' when not given")


@register(
    "rmt",
    paper="Döbler et al., Robust Mean Teacher for Continual and Gradual Test-Time Adaptation, CVPR 2023",
    updates="all parameters and a projector",
    passes="4 forward, 3 backward",
    needs_classifier=True,
    source="always",
    views=True,
)
class RMT(GradientMethod[RMTSettings]):
    """Mean teacher, contrast and source replay."""

    settings_class = RMTSettings
    no_export = "it adds the logits of two networks, the student and the teacher"
    teacher: Teacher
    projector: nn.Module
    prototypes: Tensor  # [C, d]; a row of zeros for a class without source images
    source: SourceStream

    def __init__(self, network: Network, settings: RMTSettings) -> None:
        super().__init__(network, settings)
        self.augment = settings.augment or rmt_view(per_sample=False)
        self.declare_part("teacher", Teacher(network, settings.momentum))
        self.declare_part("source", SourceStream())
        self.declare(prototypes=torch.zeros_like(network.prototypes))

    def trained_parameters(self) -> dict[str, Parameter]:
        """Return the network's parameters and the projector's."""
        return super().trained_parameters() | declare_projector(self, self.settings.projection)

    def attach(self, source: Source | None) -> None:
        """Take the source batches to read from, at the start and when a snapshot is brought back."""
        if source is not None:
            self.source.attach(source)

    def prepare(self, source: Source | None) -> None:
        """Compute the prototypes and warm up."""
        batches = self.require_source(source, relative="roid")
        self.attach(batches)
        self.prototypes, batch_size = class_means(self.network, batches, self.settings.prototype_samples)
        self.warm_up(self.settings.warmup_samples // batch_size)

    def warm_up(self, steps: int) -> None:
        """Let student and teacher agree on source batches while the learning rate grows to its value."""
        groups = self.optimizer.optimizer.param_groups
        rates = [group["lr"] for group in groups]
        for i in range(1, steps + 1):
            for group, rate in zip(groups, rates, strict=True):
                group["lr"] = rate * i / steps
            images, _ = self.source.next(self.network)
            with torch.enable_grad():
                loss = symmetric_cross_entropy(self.network(images).logits, self.teacher(images).logits).mean()
                self.optimizer.step(loss, loss.detach().isfinite())
            self.teacher.follow()

    def step(self, images: Tensor) -> Tensor:
        """Agree with the teacher, contrast, replay the source; the teacher follows."""
        for _ in range(self.settings.steps):
            with torch.enable_grad():
                out = self.network(images)
                view = self.network(self.view(images))
                taught = self.teacher(images).logits
                self.update(self.objective(out, view, taught), out)
            self.teacher.follow()
        return self.answer(images, out.logits + taught)

    def objective(self, out: Pass, view: Pass, taught: Tensor) -> Objective:
        """Weighted agreement, contrast and source loss."""
        s = self.settings
        pairs = symmetric_cross_entropy(out.logits, taught) + symmetric_cross_entropy(view.logits, taught)
        agreement = 0.5 * pairs.mean()
        contrast = nearest_contrast(self.projector, self.prototypes, out, view, s.temperature)
        value = s.target_weight * agreement + s.contrast_weight * contrast
        facts: dict[str, Fact] = {"agreement": agreement.detach(), "view_contrast": contrast.detach()}
        if s.source_weight > 0:
            images, labels = self.source.next(self.network)
            replay = F.cross_entropy(self.network(images).logits, labels)
            value, facts["source"] = value + s.source_weight * replay, replay.detach()
        return Objective(value, None, facts)

    def predict(self, images: Tensor) -> Tensor:
        """Return the sum of the student's and the teacher's logits."""
        return super().predict(images) + self.teacher(images).logits
