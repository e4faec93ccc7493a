"""What the DPL family shares: confident pseudo-labels, the two prototype losses with memory, and style transfer.

Wang, Ding, Tan, Tan, Decoupled Prototype Learning for Reliable Test-Time Adaptation, 2024. Equation numbers are the
paper's. The members of the family differ only in their loss.
"""

from dataclasses import dataclass
from typing import ClassVar, Generic, Literal, TypeVar

import torch
from torch import Tensor

from dpl.core.random import Random
from dpl.core.settings import setting
from dpl.memory import update_class_memory
from dpl.methods.base import Fact, GradientMethod, Objective, Term
from dpl.methods.settings import GradientSettings, Settings
from dpl.methods.styling import STYLE_SOURCES, STYLES, StyleTransfer
from dpl.network import Network, Pass
from dpl.objectives import classes_present, confident_labels, dpl_star, prototype_regularization

__all__ = ["DPLTerm", "MemorySettings", "PrototypeMethod", "PrototypeSettings"]

# Above this many classes Eq. 6 is estimated from a random sample of its rows: all C² similarities would cost
# more than the network.
_ALL_ROWS = 4096
_SAMPLED_ROWS = 64


@dataclass(frozen=True, kw_only=True)
class PrototypeSettings(GradientSettings, lr=5e-5, scope="all"):
    """Settings of the whole family."""

    confidence: float = setting(0.9, "alpha: samples with a probability above it take part", low=0, high=1)
    temperature: float = setting(0.1, "tau: temperature of the cosine similarities", low=1e-4)
    style: Literal["off", "two_pass", "carry_over"] = setting(
        "off", "show confident samples in the style of unconfident ones: of this batch, or of the last", choices=STYLES
    )
    style_layer: str | None = setting(None, "module whose output is restyled; found when not given")
    style_from: Literal["unconfident", "all", "confident"] = setting(
        "unconfident", "which samples lend their style", choices=STYLE_SOURCES
    )


@dataclass(frozen=True, kw_only=True)
class MemorySettings(PrototypeSettings):
    """Settings of the members with a memory."""

    momentum: float = setting(0.9, "eta: share of the old pseudo-feature that stays", low=0, high=1)
    reg_weight: float = setting(1.0, "beta: weight of the regulariser", low=0)
    memory_grad: bool | str = setting(
        "auto",
        "gradient through the fresh batch mean in the memory; 'auto': where the classifier is frozen",
        choices=(True, False, "auto"),
    )


P = TypeVar("P", bound=PrototypeSettings)


class PrototypeMethod(GradientMethod[P], Generic[P]):
    """One pass, confident labels, a prototype loss; with style transfer, the confident samples twice."""

    settings_class: ClassVar[type[Settings]] = PrototypeSettings

    def __init__(self, network: Network, settings: P) -> None:
        super().__init__(network, settings)
        self.styling = StyleTransfer(network, settings.style, settings.style_layer, settings.style_from, self.random)
        self.declare_part("styling", self.styling)

    def prototype_loss(self, features: Tensor, labels: Tensor, originals: int) -> Objective:
        """Return the loss over features whose label is not -1; rows from `originals` on are restyled copies."""
        raise NotImplementedError

    def step(self, images: Tensor) -> Tensor:
        """Predict, label, restyle if asked, update."""
        for _ in range(self.settings.steps):
            with torch.enable_grad():
                out = self.styling.first_pass(images)
                labels = confident_labels(out.logits, self.settings.confidence)
                features, all_labels = self.styling.double(out, labels)
                objective = self.prototype_loss(features, all_labels, len(labels))
                objective.facts["confident"] = (labels >= 0).float().mean()
                self.update(objective, out)
        self.styling.carry(images, labels)
        return self.answer(images, out.logits)


class DPLTerm(Term):
    """L_DPL = L_DPL* + beta L_REG (Eq. 7) with the memory of Eq. 5."""

    memory: Tensor

    def __init__(self, network: Network, settings: MemorySettings, random: Random) -> None:
        super().__init__()
        self.network, self.settings, self.random = network, settings, random
        self.declare(memory=network.prototypes.detach().clone())

    def __call__(self, out: Pass) -> Objective:
        """Return Eq. 7 on the confident samples of a pass."""
        labels = confident_labels(out.logits, self.settings.confidence)
        objective = self.objective(out.z, labels, len(labels))
        objective.facts["confident"] = (labels >= 0).float().mean()
        return objective

    def objective(self, features: Tensor, labels: Tensor, originals: int) -> Objective:
        """Return Eq. 7; the memory learns from the first `originals` rows before Eq. 6 looks at it."""
        s, prototypes = self.settings, self.network.prototypes
        contrast = dpl_star(features, prototypes, labels, s.temperature)
        present = classes_present(labels)
        if s.reg_weight == 0:
            return Objective(contrast, present > 1, {"classes": present})
        memory = update_class_memory(self.memory, features[:originals], labels[:originals], s.momentum)
        self.memory = memory.detach()
        carries = s.memory_grad if isinstance(s.memory_grad, bool) else not prototypes.requires_grad
        regulariser = prototype_regularization(
            prototypes, memory if carries else self.memory, s.temperature, self._rows(len(prototypes))
        )
        facts: dict[str, Fact] = {
            "classes": present,
            "contrast": contrast.detach(),
            "regulariser": regulariser.detach(),
        }
        return Objective(contrast + s.reg_weight * regulariser, present > 0, facts)

    def _rows(self, classes: int) -> Tensor | None:
        return None if classes <= _ALL_ROWS else self.random.integers(classes, _SAMPLED_ROWS)
