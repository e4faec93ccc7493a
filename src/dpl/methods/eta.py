"""ETA: entropy minimisation on samples that are reliable and not redundant; EATA without its Fisher term.

Niu et al., Efficient Test-Time Model Adaptation without Forgetting, ICML 2022.

    S_ent = {i : H_i < E0},  E0 = 0.4 ln C                                                        (Eq. 3)
    S_div = {i : |cos(m, p_i)| < d},  m = moving average of the selected predictions              (Eq. 4, 5)
    L     = mean over S_ent and S_div of exp(E0 - H_i) H_i                                        (Eq. 2, 6)

Updates: affine parameters of normalisation layers, with batch statistics. Needs: such layers. Output: from before
the update. A batch without a selected sample changes nothing. `max_similarity` (d) is the authors' value for ten
classes; with more, use less: 0.1 for CIFAR-100 and DomainNet-126, 0.05 for ImageNet. With few classes 0.05 would
call almost everything redundant, because even a one-hot prediction has cosine 1/sqrt(C) with a uniform average.
`objective="come"` puts the uncertainty of COME (dpl.methods.come) in place of H.
Departures: `reset` also forgets m (in the authors' code it survives); Adam 1e-3 as in the RMT library for CIFAR,
where the authors use SGD 5e-3 (CIFAR-10) and 2.5e-4 (ImageNet), both with momentum 0.9.
"""

from dataclasses import dataclass
from typing import ClassVar, Generic, TypeVar

import torch
from torch import Tensor

from dpl.core.settings import setting
from dpl.methods.base import GradientMethod, Objective
from dpl.methods.parts.uncertainty import UncertaintySettings
from dpl.methods.registry import register
from dpl.methods.settings import Settings
from dpl.network import Network, Pass
from dpl.objectives import entropy_margin, masked_mean, similarity_to

__all__ = ["ETA", "ETASettings"]


@dataclass(frozen=True, kw_only=True)
class ETASettings(UncertaintySettings, norm="batch"):
    """Settings of ETA."""

    margin: float = setting(0.4, "E0 as a share of ln C: samples with less entropy are reliable", low=0)
    max_similarity: float = setting(
        0.4, "d: samples this similar to the average prediction are redundant", low=0, formerly="redundancy"
    )
    momentum: float = setting(0.9, "share of the old average prediction that stays", low=0, high=1)


E = TypeVar("E", bound=ETASettings)


@register(
    "eta",
    paper="Niu et al., Efficient Test-Time Model Adaptation without Forgetting, ICML 2022 (without the Fisher term)",
    updates="affine parameters of normalisation layers",
    passes="1 forward, 1 backward",
)
class ETA(GradientMethod[E], Generic[E]):
    """Weighted entropy of reliable, non-redundant samples."""

    settings_class: ClassVar[type[Settings]] = ETASettings
    average: Tensor | None  # m, [C]; all zero until a sample was selected

    def __init__(self, network: Network, settings: E) -> None:
        super().__init__(network, settings)
        self.declare(average=None)

    def candidates(self, out: Pass) -> Tensor:
        """The reliable samples."""
        return self.settings.uncertainty(out.reference) < entropy_margin(out.reference, self.settings.margin)

    def loss(self, out: Pass) -> Objective:
        """Eq. 2 over the selected."""
        s = self.settings
        margin, entropies = entropy_margin(out.reference, s.margin), s.uncertainty(out.reference)
        reliable = entropies < margin
        selected = reliable & self._fresh(out.probabilities)
        self._remember(out.probabilities, selected)
        weights = (margin - entropies).exp()
        return Objective(
            masked_mean(weights * s.uncertainty(out.logits), selected),
            selected.any(),
            {"reliable": out.share(reliable), "selected": out.share(selected)},
        )

    def _fresh(self, probabilities: Tensor) -> Tensor:
        """Eq. 5: which predictions differ from what was learned from so far; all, before the first."""
        if self.average is None:
            self.average = torch.zeros_like(probabilities[0])
        similar = similarity_to(self.average, probabilities).abs() >= self.settings.max_similarity
        return ~similar | (self.average.sum() == 0)

    def _remember(self, probabilities: Tensor, selected: Tensor) -> None:
        """Eq. 4: move the average towards the mean selected prediction, if any."""
        if self.average is not None:
            mean = masked_mean(probabilities, selected)
            before = torch.where(self.average.sum() > 0, self.average, mean)  # the first mean is taken as it is
            moved = self.settings.momentum * before + (1 - self.settings.momentum) * mean
            self.average = torch.where(selected.any(), moved, self.average)
