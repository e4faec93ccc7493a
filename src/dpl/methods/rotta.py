"""RoTTA: a teacher with slowly moving statistics, taught from a class-balanced bank of recent, certain samples.

Yuan, Xie, Li, Robust Test-Time Adaptation in Dynamic Scenarios, CVPR 2023. For streams whose classes come in runs.
Every image is offered to a bank of N samples (dpl.memory.bank) with its predicted class and its entropy. After every
N images, with the bank's samples X, their ages A and an augmented view X~:

    mu <- (1 - a) mu + a mu(X),  the same for the variance, at each BatchNorm layer and used there at once
    L = (1/|X|) sum_i sigmoid(-A_i / N) (-sum_c softmax f'(X_i) log softmax f(X~_i))
    f' <- (1 - nu) f' + nu f

Updates: affine parameters of normalisation layers, and running statistics. Needs: nothing; images in [0, 1] of one size
for the views and the bank. Output: f'(x) from before the updates, with running statistics.
Departures from the authors' code: views have factors of their own for each image (theirs, one for all:
`augment=dpl.views.cotta_view(per_sample=False)`); with `steps` above 1 the bank is learnt from several times, not
filled several times with the same images; frozen weights are shared by student and teacher.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from dpl.core.numerics import at_least_float32
from dpl.core.settings import setting
from dpl.memory.bank import BankPolicy, BankRecord, empty_record, insert_timely, occupied_by_age
from dpl.methods.base import Objective
from dpl.methods.parts.banked import MemoryBankMethod, MemoryBankSettings
from dpl.methods.parts.norm_rules import BlendedStatistics
from dpl.methods.parts.teacher import AnsweredByTeacher, Teacher
from dpl.methods.registry import register
from dpl.network import Network, Pass
from dpl.objectives import entropy_of_probabilities
from dpl.objectives.consistency import soft_cross_entropy
from dpl.views import cotta_view

__all__ = ["RoTTA", "RoTTASettings"]


@dataclass(frozen=True, kw_only=True)
class RoTTASettings(MemoryBankSettings):
    """Settings of RoTTA."""

    bn_momentum: float = setting(
        0.05, "a: share of the bank's statistics in BatchNorm's at an update", low=0, high=1, formerly="statistics"
    )
    momentum: float = setting(0.999, "1 - nu: share of the teacher that stays at an update", low=0, high=1)
    time_weight: float = setting(1.0, "lambda_t: weight of a sample's age in its score", low=0)
    uncertainty_weight: float = setting(
        1.0, "lambda_u: weight of a sample's entropy in its score", low=0, formerly="doubt_weight"
    )
    augment: Callable[[Tensor], Tensor] | None = setting(None, "random view of a batch; the authors' when not given")


@register(
    "rotta",
    paper="Yuan et al., Robust Test-Time Adaptation in Dynamic Scenarios, CVPR 2023",
    updates="affine parameters and running statistics of normalisation layers",
    passes="1 forward; every 64 images 2 forward and 1 backward over 64",
    views=True,
    host_reads=2,
)
class RoTTA(AnsweredByTeacher, MemoryBankMethod[RoTTASettings]):
    """A robust bank and a teacher."""

    settings_class = RoTTASettings
    labels: Tensor  # of the bank's samples; these three are its `BankRecord`
    ages: Tensor
    uncertainty: Tensor

    def __init__(self, network: Network, settings: RoTTASettings) -> None:
        super().__init__(network, settings)
        self.augment = settings.augment or cotta_view()
        self.declare_part("teacher", Teacher(network, settings.momentum))
        like = torch.empty(0, device=network.device, dtype=network.dtype)
        self.declare(**empty_record(settings.capacity, at_least_float32(like))._asdict())

    @property
    def slots(self) -> BankRecord:
        """What the bank knows of its samples."""
        return BankRecord(self.labels, self.ages, self.uncertainty)

    def choose(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Offer samples to the bank with their predicted class and entropy."""
        p = at_least_float32(logits).softmax(dim=1)
        policy = BankPolicy(logits.shape[1], self.settings.time_weight, self.settings.uncertainty_weight)
        slots, rows, places = insert_timely(self.slots, p.argmax(dim=1), entropy_of_probabilities(p, 1e-6), policy)
        self.labels, self.ages, self.uncertainty = slots
        return rows, places

    def learn(self) -> None:
        """Let the student follow the teacher on the bank's samples, and the teacher the student."""
        s, order = self.settings, occupied_by_age(self.slots)
        samples = self.stored(order)
        weight = torch.sigmoid(-self.ages[order].to(self.uncertainty.dtype) / s.capacity)
        for _ in range(s.steps):
            view = self.view(samples)
            with torch.no_grad():
                target = robust_pass(self.teacher.network, samples, s.bn_momentum).logits
            with torch.enable_grad():
                out = robust_pass(self.network, view, s.bn_momentum)
                self.update(Objective((soft_cross_entropy(out.logits, target) * weight).mean()), out)
            self.teacher.follow()


def robust_pass(network: Network, images: Tensor, share: float) -> Pass:
    """Run a batch with running statistics moved by `share` towards the batch's own, and keep them moved."""
    with network.norm.using(BlendedStatistics(share, correction=0)), network.norm.recording() as used:
        out = network(images)
    for layer, (mean, variance) in used.items():
        if layer.running_mean is not None and layer.running_var is not None:
            layer.running_mean.copy_(mean)
            layer.running_var.copy_(variance)
    return out
