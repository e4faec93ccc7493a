"""DPL: decoupled prototypes with a memory of class pseudo-features (Section III-A of the paper).

Wang, Ding, Tan, Tan, Decoupled Prototype Learning for Reliable Test-Time Adaptation, 2024.

    y_i = argmax p_i, used where max p_i > alpha                                                             (Eq. 1)
    L_DPL* = -(1/C') sum_k log  sum over Z+ of e^{<w_k, z_i>/tau}  /  sum over all z_j of e^{<w_k, z_j>/tau}  (Eq. 4)
    z*_k <- eta z*_k + (1 - eta) mean of the confident z of class k                                          (Eq. 5)
    L_REG = -(1/C) sum_k log  e^{<w_k, z*_k>/tau} / sum_c e^{<w_k, z*_c>/tau}                                (Eq. 6)
    L = L_DPL* + beta L_REG                                                                                  (Eq. 7)

Updates: all parameters, with running statistics. Needs: a linear classifier. Output: from before the update. The memory
starts as a copy of the classifier's rows, is updated first and then used; its history carries no gradient. Where the
classifier is frozen (scope="affine") the fresh batch mean does, or L_REG would be a constant there (`memory_grad`).
"""

from dataclasses import dataclass
from typing import ClassVar, Generic, Literal, Self, TypeVar

from torch import Tensor

from dpl.core.random import Random
from dpl.core.settings import setting
from dpl.memory import update_class_memory
from dpl.methods.base import Fact, GradientMethod, Objective, Term
from dpl.methods.registry import register
from dpl.methods.settings import GradientSettings, Settings
from dpl.network import Network, Pass
from dpl.objectives import classes_present, confident_labels, dpl_star, prototype_regularization

__all__ = ["DPL", "DPLSettings", "DPLTerm", "PrototypeMethod", "PrototypeSettings"]

# Above this many classes Eq. 6 is estimated from a random sample of its rows: all C² similarities would cost
# more than the network.
_ALL_CLASSES, _SAMPLED_CLASSES = 4096, 64


@dataclass(frozen=True, kw_only=True)
class PrototypeSettings(GradientSettings, lr=5e-5, scope="all"):
    """Settings of dpl_o, dpl_star, dpl and dpl_dagger."""

    confidence: float = setting(0.9, "alpha: samples with a probability above it take part", low=0, high=1)
    temperature: float = setting(0.1, "tau: temperature of the cosine similarities", low=1e-4)
    style: Literal["off", "two_pass", "carry_over"] = setting(
        "off", "also show confident samples in the style of unconfident ones: of this batch, or of the last"
    )
    style_layer: str | None = setting(None, "module whose output is restyled; found when not given")
    style_from: Literal["unconfident", "all", "confident"] = setting("unconfident", "which samples lend their style")


@dataclass(frozen=True, kw_only=True)
class DPLSettings(PrototypeSettings):
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
    """What the family shares: only confident samples take part, and style transfer can be added."""

    settings_class: ClassVar[type[Settings]] = PrototypeSettings

    @classmethod
    def for_settings(cls, settings: Settings) -> type[Self]:
        """Return the class to build: `style=` adds style transfer to any member of the family."""
        if not isinstance(settings, PrototypeSettings) or settings.style == "off":
            return cls
        from dpl.methods.dpl_dagger import with_style  # dpl_dagger builds on this module

        return with_style(cls)

    def candidates(self, out: Pass) -> Tensor:
        """Eq. 1: the confident samples."""
        return confident_labels(out.reference, self.settings.confidence) >= 0


class DPLTerm(Term):
    """L_DPL (Eq. 7) with the memory of Eq. 5; also what `X+dpl` adds to X."""

    memory: Tensor  # z*, [C, d]

    def __init__(self, network: Network, settings: DPLSettings, random: Random) -> None:
        super().__init__()
        self.network, self.settings, self.random = network, settings, random
        self.declare(memory=network.prototypes.detach().clone())

    def candidates(self, out: Pass) -> Tensor:
        """Eq. 1: the confident samples."""
        return confident_labels(out.reference, self.settings.confidence) >= 0

    def __call__(self, out: Pass) -> Objective:
        """Eq. 7; the memory is updated before Eq. 6 uses it."""
        s, w = self.settings, self.network.prototypes
        labels = confident_labels(out.reference, s.confidence)  # -1: not confident
        present = classes_present(labels)
        contrast = dpl_star(out.z, w, labels, s.temperature)  # Eq. 4
        facts: dict[str, Fact] = {"confident": out.share(labels >= 0), "classes": present}
        if s.reg_weight == 0:
            return Objective(contrast, present > 1, facts)
        own = slice(out.originals)  # restyled copies do not enter the memory
        memory = update_class_memory(self.memory, out.z[own], labels[own], s.momentum)  # Eq. 5
        self.memory = memory.detach()
        through = s.memory_grad if isinstance(s.memory_grad, bool) else not w.requires_grad
        sampled = None if len(w) <= _ALL_CLASSES else self.random.integers(len(w), _SAMPLED_CLASSES)
        regulariser = prototype_regularization(w, memory if through else self.memory, s.temperature, sampled)  # Eq. 6
        facts |= {"contrast": contrast.detach(), "regulariser": regulariser.detach()}
        return Objective(contrast + s.reg_weight * regulariser, present > 0, facts)  # Eq. 7

    def restart(self) -> None:
        """Start the memory from the classifier's rows again."""
        self.memory = self.network.prototypes.detach().clone()


@register(
    "dpl",
    paper="Wang et al., Decoupled Prototype Learning, 2024 (Eq. 7)",
    updates="all parameters, class memory",
    passes="1 forward, 1 forward and backward of the confident",
    needs_classifier=True,
)
class DPL(PrototypeMethod[DPLSettings]):
    """Eq. 7."""

    settings_class = DPLSettings
    term: DPLTerm

    def __init__(self, network: Network, settings: DPLSettings) -> None:
        super().__init__(network, settings)
        self.declare_part("term", DPLTerm(network, settings, self.random))

    def loss(self, out: Pass) -> Objective:
        """Eq. 7."""
        return self.term(out)
