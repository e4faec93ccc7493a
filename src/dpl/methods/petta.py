"""PeTTA: RoTTA that measures how far it has strayed from the source, and holds back accordingly.

Hoang, Vo, Do, Persistent Test-time Adaptation in Recurring Testing Scenarios, NeurIPS 2024. For streams whose domains
come again and again, on which other methods slowly collapse. The bank, the robust BatchNorm and the teacher f' are
RoTTA's. Classes c present among the teacher's labels of a batch, with source mean mu_c and variance var_c of their
features and the moving mean m_c <- (1 - n) m_c + n mean of the batch, give the divergence

    g = 1 - exp(-mean over c and dimensions of (m_c - mu_c)^2 / var_c)

and the update, on the bank's samples X, a view X~ and the source network f0, all with robust statistics:

    L = 1/2 mean [SCE(f(X), f'(X)) + SCE(f(X~), f'(X))] + CE(f(X~), f0(X)) - g lambda mean over tensors of cos(w, w0)
    f' <- (1 - (1 - g) alpha) f' + (1 - g) alpha f

Updates: affine parameters of normalisation layers, and running statistics. Needs: a linear classifier and source images
once, for mu and var (their labels are not used: the network's own predictions are). Output: f'(x) from before the
update, with running statistics. Departures from the authors' code: those of RoTTA; a class with fewer than two source
images has no divergence (theirs becomes NaN); their alternative regulariser (squared distance) is not offered.
"""

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from dpl.core.numerics import at_least_float32
from dpl.core.settings import setting
from dpl.memory import update_class_memory
from dpl.memory.bank import occupied_by_age
from dpl.methods.base import Objective, Source
from dpl.methods.parts.norm_rules import RunningStatistics
from dpl.methods.parts.source_data import predicted_class_statistics
from dpl.methods.parts.teacher import Teacher
from dpl.methods.registry import register
from dpl.methods.rotta import RoTTA, RoTTASettings, robust_pass
from dpl.network import Network
from dpl.objectives.consistency import soft_cross_entropy, symmetric_cross_entropy

__all__ = ["PeTTA", "PeTTASettings"]


@dataclass(frozen=True, kw_only=True)
class PeTTASettings(RoTTASettings, update_every=1):
    """Settings of PeTTA; the authors' for CIFAR. They update after each batch, of 64 images."""

    reg_weight: float = setting(10.0, "lambda: weight of the regulariser at full divergence", low=0)
    anchor_weight: float = setting(1.0, "weight of the agreement with the source network", low=0)
    feature_share: float = setting(0.05, "n: share of a batch in the moving class means", low=0, high=1)
    loss: Literal["sce", "ce"] = setting(
        "sce",
        "agreement with the teacher: symmetric on both views, or plain on the view (ImageNet-C)",
        choices=("sce", "ce"),
    )
    source_samples: int = setting(100_000, "source images after which their statistics are ready", low=1)


@register(
    "petta",
    paper="Hoang et al., Persistent Test-time Adaptation in Recurring Testing Scenarios, NeurIPS 2024",
    updates="affine parameters and running statistics of normalisation layers",
    passes="5 forward, 2 backward",
    needs_classifier=True,
    source="once",
    views=True,
    host_reads=3,
)
class PeTTA(RoTTA):
    """A robust bank, a teacher, and a leash as short as the divergence asks for."""

    settings_class = PeTTASettings
    settings: PeTTASettings
    anchor: Teacher
    source_mean: Tensor  # mu, [C, d]
    source_variance: Tensor  # var, [C, d]
    known: Tensor  # [C]: classes with a variance
    means: Tensor  # m, [C, d]

    def __init__(self, network: Network, settings: PeTTASettings) -> None:
        super().__init__(network, settings)
        self.declare_part("anchor", Teacher(network, rule=RunningStatistics()))  # never follows: the source model
        zeros = torch.zeros_like(at_least_float32(network.prototypes))
        unknown = torch.zeros(network.classes, dtype=torch.bool, device=network.device)
        self.declare(source_mean=zeros, source_variance=zeros.clone(), means=zeros.clone(), known=unknown)

    def prepare(self, source: Source | None) -> None:
        """Compute the features' mean and variance for each predicted class."""
        batches = self.require_source(source, relative="rotta")
        mean, variance, known = predicted_class_statistics(self.network, batches, self.settings.source_samples)
        self.source_mean, self.source_variance = mean.to(self.means), variance.to(self.means)
        self.means, self.known = self.source_mean.clone(), known.to(self.known.device)

    def step(self, images: Tensor) -> Tensor:
        """Predict with the teacher, fill the bank, measure the divergence, and learn."""
        self._check_size(images)
        with torch.no_grad():
            out = self.teacher(images)
        self._remember(images, out.logits)
        labels = out.logits.argmax(dim=1)
        divergence = self.divergence(labels)
        self.means = update_class_memory(self.means, out.z, labels, 1 - self.settings.feature_share)
        self.facts = {"updated": False, "reason": f"updates come every {self.settings.update_every} images"}
        if self.seen >= self.settings.update_every:
            self.seen = 0
            for _ in range(self.settings.steps):
                self.learn_within(divergence)
        self.facts |= {"bank": (self.labels >= 0).sum(), "divergence": divergence}
        return self.answer(images, out.logits)

    def divergence(self, labels: Tensor) -> Tensor:
        """Return g for the classes among `labels`, from 0 (as the source) to 1."""
        present = torch.zeros_like(self.known).index_fill(0, labels, True) & self.known
        distance = ((self.means - self.source_mean) ** 2 / (self.source_variance + 1e-6)).mean(dim=1)
        return 1 - torch.exp(-(distance * present).sum() / present.sum().clamp(min=1))

    def learn_within(self, divergence: Tensor) -> None:
        """Take one step on the bank's samples; the further from the source, the more held back."""
        if self.samples is None:
            return
        s, samples = self.settings, self.samples[occupied_by_age(self.slots)]
        with torch.no_grad():
            taught = robust_pass(self.teacher.network, samples, s.bn_momentum).logits
            first = robust_pass(self.anchor.network, samples, s.bn_momentum).logits
        with torch.set_grad_enabled(s.loss == "sce"):  # the plain pass also moves the statistics
            plain = robust_pass(self.network, samples, s.bn_momentum).logits
        with torch.enable_grad():
            out = robust_pass(self.network, self.view(samples), s.bn_momentum)
            anchoring = soft_cross_entropy(out.logits, first).mean()
            value = self.agreement(plain, out.logits, taught) + s.anchor_weight * anchoring
            self.update(Objective(value + divergence * s.reg_weight * self.drift()), out)
        # One number comes to the host for each update: the fused moving average takes its weight from there.
        kept = 1 - float(1 - divergence) * (1 - s.momentum)
        self.teacher.follow(kept)

    def agreement(self, plain: Tensor, view: Tensor, taught: Tensor) -> Tensor:
        """Return the loss that lets the student follow the teacher."""
        if self.settings.loss == "ce":
            return soft_cross_entropy(view, taught).mean()
        return 0.5 * (symmetric_cross_entropy(plain, taught) + symmetric_cross_entropy(view, taught)).mean()

    def drift(self) -> Tensor:
        """Return minus the mean cosine between the trained tensors and the source's; -1: none has turned."""
        source = dict(self.anchor.weights.named_parameters())
        pairs = ((parameter.flatten(), source[name].flatten()) for name, parameter in self.trainable.items())
        return -torch.stack([F.cosine_similarity(now, then, dim=0) for now, then in pairs]).mean()
