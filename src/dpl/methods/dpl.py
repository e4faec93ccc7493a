"""DPL: decoupled prototypes with a memory of class pseudo-features (Section III-A of the paper).

Wang, Ding, Tan, Tan, Decoupled Prototype Learning for Reliable Test-Time Adaptation, 2024.

    y_i = argmax p_i, used where max p_i > alpha                                                             (Eq. 1)
    L_DPL* = -(1/C') sum_k log  sum over Z+ of e^{<w_k, z_i>/tau}  /  sum over all z_j of e^{<w_k, z_j>/tau}  (Eq. 4)
    z*_k <- eta z*_k + (1 - eta) mean of the confident z of class k                                          (Eq. 5)
    L_REG = -(1/C) sum_k log  e^{<w_k, z*_k>/tau} / sum_c e^{<w_k, z*_c>/tau}                                (Eq. 6)
    L = L_DPL* + beta L_REG                                                                                  (Eq. 7)

Updates: all parameters, with running statistics. Needs: a linear classifier. Output: from before the update. The memory
starts as a copy of the classifier's rows, is updated first and then used, and carries no gradient: Eq. 6 moves the
prototypes, and with a frozen classifier (scope="affine" or "features") dpl learns as dpl_star does. A gradient through
the batch's own share (`memory_grad=True`) brought nothing that could be measured (docs/dpl.md). With fewer than two
classes among the confident samples the memory is updated and no weight moves: Eq. 4 is zero there, and Adam would make
full steps of what little Eq. 6 leaves, and of its own momentum. Nor does anything change while the latest images look
like one class, or few (`mixed_only`): predictions of two classes are then one right and one wrong.
"""

from dataclasses import dataclass
from typing import Literal

import torch.nn.functional as F
from torch import Tensor

from dpl.core.numerics import at_least_float32
from dpl.core.random import Random
from dpl.core.settings import setting
from dpl.memory import update_class_memory
from dpl.methods.base import Fact, Objective
from dpl.methods.parts.prototype_family import (
    MANY_CLASSES,
    SAMPLED_CLASSES,
    PrototypeMethod,
    PrototypeSettings,
    PrototypeTerm,
)
from dpl.methods.registry import register
from dpl.network import Network, Pass
from dpl.objectives import dpl_star, prototype_regularization

__all__ = ["DPL", "DPLSettings", "DPLTerm", "PrototypeMethod"]


@dataclass(frozen=True, kw_only=True)
class DPLSettings(PrototypeSettings):
    """Settings of the members with a memory."""

    momentum: float = setting(0.9, "eta: share of the old pseudo-feature that stays", low=0, high=1)
    reg_weight: float = setting(1.0, "beta: weight of the regulariser", low=0)
    memory: Literal["features", "directions"] = setting(
        "features", "what Eq. 5 averages: features as they are, or scaled to length one, as prototypes then are too"
    )
    memory_grad: bool = setting(False, "let gradients flow through the batch's own share of the memory")


class DPLTerm(PrototypeTerm[DPLSettings]):
    """L_DPL (Eq. 7) with the memory of Eq. 5."""

    memory: Tensor  # z*, [C, d]

    def __init__(self, network: Network, settings: DPLSettings, random: Random) -> None:
        super().__init__(network, settings, random)
        self.declare(memory=self._first_memory())

    def loss(self, out: Pass, labels: Tensor) -> Objective:
        """Eq. 7; the memory is updated before Eq. 6 uses it."""
        s, w = self.settings, self.network.prototypes
        contrast = dpl_star(out.z, w, labels, s.temperature)  # Eq. 4
        if s.reg_weight == 0:
            return Objective(contrast)
        own = slice(out.originals)  # restyled copies do not enter the memory
        z = F.normalize(out.z[own], dim=1) if s.memory == "directions" else out.z[own]
        memory = update_class_memory(self.memory, z, labels[own], s.momentum)  # Eq. 5
        self.memory = memory.detach()
        used = memory if s.memory_grad else self.memory
        some = self.random.integers(len(w), SAMPLED_CLASSES) if len(w) > MANY_CLASSES else None
        regulariser = prototype_regularization(w, used, s.temperature, some)  # Eq. 6
        facts: dict[str, Fact] = {"contrast": contrast.detach(), "regulariser": regulariser.detach()}
        return Objective(contrast + s.reg_weight * regulariser, facts=facts)  # Eq. 7

    def restart(self) -> None:
        """Start the memory from the classifier's rows again."""
        self.memory = self._first_memory()

    def _first_memory(self) -> Tensor:
        w = at_least_float32(self.network.prototypes.detach())
        return F.normalize(w, dim=1) if self.settings.memory == "directions" else w.clone()


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
    term_class = DPLTerm
    term: DPLTerm
