"""SWR & NSP: hold the layers that a shift does not touch, and align features with the nearest source prototypes.

Choi, Yang, Choi, Yun, Improving Test-Time Adaptation via Shift-agnostic Weight Regularization and Nearest Source
Prototypes, ECCV 2022. Built from the paper's description, no reference code exists: numbers need not agree with theirs.

Before the first batch, with labelled source images x and transformed ones T(x) (colour distortion and blur):

    s_l = mean_i cos(g_l(x_i), g_l(T(x_i))),  g_l the gradient of the cross-entropy for layer l;   w = minmax(s)^2

and a projection with one prototype q_k for each class (a moving average of projected features) is trained by
cross-entropy of q(x) = softmax(cos(projection, q_k) / tau), for x and for T(x). Then for each batch:

    L_main = a mean_i H(p_i) - b H(mean_i p_i)
    L_aux  = a mean_i H(q(x_i)) - b H(mean_i q(x_i)) + CE(q(x), q(T(x)))
    L      = L_main + c L_aux + r sum_l w_l |theta_l - theta*_l|^2

Updates: all parameters; the classifier feels L_main alone, the projection and the prototypes stay. Needs: a linear
classifier, and labelled source images once. Output: from before the update. Where the description is silent, ours:
theta* is the source's (with the last step's the penalty would have no gradient), batch statistics, the target of CE
carries no gradient, a two-layer projection trained on frozen features, and the weights a, b, c, r. A batch of one is
predicted without an update: its mean prediction is its own, and L_main would cancel.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from dpl.core.errors import SettingError
from dpl.core.settings import setting
from dpl.methods.base import GradientMethod, Objective, Source
from dpl.methods.parts.nearest_prototypes import NearestPrototypes
from dpl.methods.parts.norm_rules import RunningStatistics
from dpl.methods.parts.shift_penalty import ShiftPenalty
from dpl.methods.parts.source_data import on_network
from dpl.methods.registry import register
from dpl.methods.settings import GradientSettings
from dpl.network import Network
from dpl.objectives import entropy, marginal_entropy
from dpl.views import adacontrast_strong_view

__all__ = ["SWRNSP", "SWRNSPSettings"]


@dataclass(frozen=True, kw_only=True)
class SWRNSPSettings(GradientSettings, norm="batch", scope="all"):
    """Settings of SWR & NSP."""

    entropy_weight: float = setting(1.0, "a: weight of the mean entropy", low=0)
    balance_weight: float = setting(1.0, "b: weight of the entropy of the mean prediction", low=0)
    aux_weight: float = setting(0.1, "c: weight of the task on nearest source prototypes", low=0)
    reg_weight: float = setting(100.0, "r: weight of the penalty on leaving the source weights", low=0)
    temperature: float = setting(0.1, "tau: temperature of the similarities to prototypes", low=1e-4)
    momentum: float = setting(0.99, "share of the old prototype that stays", low=0, high=1)
    embedding: int = setting(128, "width of the projection", low=1)
    epochs: int = setting(10, "passes over the source features that train the projection", low=1)
    source_samples: int = setting(10_000, "how many source images are used at most", low=1)
    probes: int = setting(128, "how many of them tell the layers apart (one backward pass each, twice)", low=1)
    augment: Callable[[Tensor], Tensor] | None = setting(
        None, "T: images [B, ...] -> changed images; None: colour distortion, blur and flip"
    )


@register(
    "swr_nsp",
    paper="Choi et al., Shift-agnostic Weight Regularization and Nearest Source Prototypes, ECCV 2022 "
    "(built from the paper's description, no reference code)",
    updates="all parameters",
    passes="2 forwards, 2 backwards",
    needs_classifier=True,
    source="once",
    views=True,
    min_batch=2,
)
class SWRNSP(GradientMethod[SWRNSPSettings]):
    """Shift-agnostic weight regularisation with nearest source prototypes."""

    settings_class = SWRNSPSettings
    penalty: ShiftPenalty
    nearest: NearestPrototypes

    def __init__(self, network: Network, settings: SWRNSPSettings) -> None:
        super().__init__(network, settings)
        self.augment = settings.augment or adacontrast_strong_view(crop=False)
        self.declare_part("penalty", ShiftPenalty(network, self.trainable))
        nearest = NearestPrototypes(network, settings.embedding, settings.temperature, self.random)
        self.declare_part("nearest", nearest)

    def prepare(self, source: Source | None) -> None:
        """Find which layers a shift touches, and train the projection."""
        s = self.settings
        features: list[tuple[Tensor, Tensor, Tensor]] = []  # of images, of changed images, labels
        alike: list[Tensor] = []
        for batch in self.require_source(source, relative="shot_im"):
            images, labels = on_network(batch, self.network)
            changed = self.view(images)
            with self.network.norm.using(RunningStatistics()):
                features.append((self._features(images), self._features(changed), labels))
                for row in zip(images, changed, labels, strict=True):
                    if len(alike) < s.probes:
                        alike.append(self.penalty.likeness(*row))
            if sum(len(labels) for *_, labels in features) >= s.source_samples:
                break
        if not features:
            raise SettingError("source gave no batch: expected a list or a loader of (images, labels) batches")
        self.penalty.weigh(alike)
        self.nearest.fit(*map(torch.cat, zip(*features, strict=True)), momentum=s.momentum, epochs=s.epochs)

    def step(self, images: Tensor) -> Tensor:
        """Predict the batch and its changed version together, update."""
        for _ in range(self.settings.steps):
            with torch.enable_grad(), self.network.norm.using(groups=2):
                both = self.network(torch.cat([images, self.view(images)]))
                out, changed = both.first(len(images)), both.z[len(images) :]
                self.update(self._objective(out.logits, out.z, changed), out)
        return self.answer(images, out.logits)

    def _objective(self, logits: Tensor, features: Tensor, changed: Tensor) -> Objective:
        s, near = self.settings, self.nearest.logits(features)
        main = self._sure_and_balanced(logits)
        agreement = F.cross_entropy(self.nearest.logits(changed), near.detach().softmax(dim=1))
        auxiliary, penalty = self._sure_and_balanced(near) + agreement, self.penalty()
        return Objective(
            main + s.aux_weight * auxiliary + s.reg_weight * penalty,
            facts={"main": main.detach(), "auxiliary": auxiliary.detach(), "penalty": penalty.detach()},
        )

    def _sure_and_balanced(self, logits: Tensor) -> Tensor:
        s = self.settings
        return s.entropy_weight * entropy(logits).mean() - s.balance_weight * marginal_entropy(logits)

    @torch.no_grad()
    def _features(self, images: Tensor) -> Tensor:
        return self.network(images).z
