"""AdaContrast: contrast with a momentum encoder and learn pseudo-labels that neighbours voted for, online.

Chen et al., Contrastive Test-Time Adaptation, CVPR 2022; as the one-pass method of the RMT library (Döbler et al.),
which is what the DPL paper compares with. For a weak view w and two strong views q, k of each image:

    y = argmax p(w), once enough samples are known of the mean p of the 10 nearest features in a bank instead
    L = CE(p(q), y) + InfoNCE(f(q), f'(k), queue without entries of class y; tau) - H(mean of p(q) over the batch)

f' is the momentum encoder f' <- m f' + (1 - m) f, moved before it sees k. Its features of k enter the queue, its
features and probabilities of w the bank.

Updates: all parameters; BatchNorm uses the batch's statistics while learning and moves the running ones. Needs: a
linear classifier. Output: the image itself, after the update, with the running statistics.
Departures from the authors' code: (1) they write the new labels into the queue before the loss, so that the oldest
entries are masked by labels of other samples; (2) their bank, once full, first overwrites its newest entries, not
its oldest. Both are right here; `authors=True` does as they do. (3) The bank holds exactly `queue_size` samples, theirs
up to a batch more. (4) No dropout. (5) Parameters of any name train, theirs only those called weight or bias.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpl.core.optimizer import NamedOptimizer
from dpl.core.settings import setting
from dpl.memory.queue import write_ring
from dpl.methods.base import Fact, GradientMethod, Objective
from dpl.methods.parts.head_rate import with_head_rate
from dpl.methods.parts.neighbour_bank import NeighbourBank
from dpl.methods.parts.norm_rules import TrackRunning
from dpl.methods.parts.teacher import Teacher
from dpl.methods.registry import register
from dpl.methods.settings import GradientSettings
from dpl.network import Network, Pass
from dpl.objectives import marginal_entropy
from dpl.objectives.contrastive import class_aware_info_nce
from dpl.views import adacontrast_strong_view, adacontrast_weak_view

__all__ = ["AdaContrast", "AdaContrastSettings"]


@dataclass(frozen=True, kw_only=True)
class AdaContrastSettings(
    GradientSettings, lr=2e-4, optimizer="nesterov", weight_decay=1e-4, scope="all", output="after"
):
    """Settings of AdaContrast."""

    temperature: float = setting(0.07, "tau of the contrast with the queue", low=1e-4)
    momentum: float = setting(0.999, "share of the momentum encoder that stays at each step", low=0, high=1)
    queue_size: int = setting(16384, "samples in the queue and in the bank of neighbours", low=1)
    neighbours: int = setting(10, "neighbours that vote for a pseudo-label", low=1)
    refine_after: int = setting(1024, "samples after which neighbours vote", low=1)
    label_weight: float = setting(1.0, "weight of the cross-entropy", low=0)
    contrast_weight: float = setting(1.0, "weight of the contrast with the queue", low=0)
    diversity_weight: float = setting(1.0, "weight of the entropy of the mean prediction", low=0)
    head_lr_factor: float = setting(
        1.0,
        "learning rate of the classifier, and of a bottleneck before it, over the rest's (DomainNet-126: 10)",
        low=0,
    )
    weak: Callable[[Tensor], Tensor] | None = setting(None, "weak view of a batch; the authors' when not given")
    strong: Callable[[Tensor], Tensor] | None = setting(None, "strong view of a batch; the authors' when not given")
    authors: bool = setting(
        False, "queue labels before the loss and the bank's first overwrite as in the authors' code"
    )


@register(
    "adacontrast",
    paper="Chen et al., Contrastive Test-Time Adaptation, CVPR 2022 (online, as in the RMT library)",
    updates="all parameters and running statistics",
    passes="5 forward, 1 backward",
    needs_classifier=True,
    views=True,
)
class AdaContrast(NeighbourBank, GradientMethod[AdaContrastSettings]):
    """Pseudo-labels, contrast and diversity."""

    settings_class = AdaContrastSettings
    teacher: Teacher  # the momentum encoder
    seen: int  # samples, counted until neighbours vote
    queue: Tensor  # [K, d], unit vectors
    queue_labels: Tensor  # [K]
    queue_next: int

    def __init__(self, network: Network, settings: AdaContrastSettings) -> None:
        super().__init__(network, settings)
        self.weak, self.strong = settings.weak or adacontrast_weak_view(), settings.strong or adacontrast_strong_view()
        # Its running statistics are only used where a batch has none; they follow the stream for that.
        self.declare_part("teacher", Teacher(network, settings.momentum, TrackRunning()))
        size, width, like = settings.queue_size, network.classifier.in_features, network.prototypes.detach()
        noise = torch.randn(size, width, generator=self.random.generator, dtype=like.dtype).to(like.device)
        labels = self.random.integers(network.classes, size)
        self.declare(queue=F.normalize(noise, dim=1), queue_labels=labels, queue_next=0, seen=0)
        self.change_in_place("queue", "queue_labels")
        self.declare_bank(network, size)

    def make_optimizer(self, parameters: dict[str, nn.Parameter]) -> NamedOptimizer:
        """Return the optimizer, with a learning rate of its own for the head."""
        s = self.settings
        if s.head_lr_factor == 1:
            return super().make_optimizer(parameters)
        return with_head_rate(super().make_optimizer, parameters, self.network, s.lr * s.head_lr_factor)

    def step(self, images: Tensor) -> Tensor:
        """Learn from three views, then predict the images themselves."""
        earlier = self.predict(images) if self.settings.output == "before" else None
        for _ in range(self.settings.steps):
            weak = self.view(images, self.weak)
            query, key = (self.view(images, self.strong) for _ in range(2))
            with self.network.norm.using(TrackRunning()):
                labels = self.pseudo_labels(weak)
                with torch.enable_grad():
                    out = self.network(query)
                    self.teacher.follow()
                    self.learn(out, F.normalize(self.teacher(key).z, dim=1), labels)
            self.fill_bank(self.teacher(weak), overwrite_newest=self.settings.authors)
        return self.predict(images) if earlier is None else earlier

    @torch.no_grad()
    def pseudo_labels(self, weak: Tensor) -> Tensor:
        """Label by the network's own prediction at first, then by the vote of the nearest in the bank."""
        out = self.network(weak)
        if self.seen < self.settings.refine_after:
            self.seen += len(weak)
            return out.logits.argmax(dim=1)
        return self.voted(out.z, self.settings.neighbours)

    def learn(self, out: Pass, keys: Tensor, labels: Tensor) -> None:
        """Take one step on the query pass and move the queue on."""
        if self.settings.authors:
            write_ring(self.queue_labels, labels, self.queue_next)
        self.update(self.objective(out, keys, labels), out)
        write_ring(self.queue_labels, labels, self.queue_next)
        self.queue_next = write_ring(self.queue, keys, self.queue_next)

    def objective(self, out: Pass, keys: Tensor, labels: Tensor) -> Objective:
        """Weighted cross-entropy, contrast and diversity of the query pass."""
        s = self.settings
        fit = F.cross_entropy(out.logits, labels)
        contrast = class_aware_info_nce(out.z, keys, labels, self.queue, self.queue_labels, s.temperature)
        diversity = marginal_entropy(out.logits, eps=1e-8)
        value = s.label_weight * fit + s.contrast_weight * contrast - s.diversity_weight * diversity
        facts: dict[str, Fact] = {"fit": fit.detach(), "queue_contrast": contrast.detach()}
        return Objective(value, None, facts | {"diversity": diversity.detach()})
