"""DPL: decoupled prototypes with a memory of class pseudo-features (Eq. 7).

Wang et al., Decoupled Prototype Learning for Reliable Test-Time Adaptation, 2024.

    z*_k <- eta z*_k + (1 - eta) mean of the confident z of class k                                          (Eq. 5)
    L_REG = -(1/C) sum_k log  e^{<w_k, z*_k>/tau} / sum_c e^{<w_k, z*_c>/tau}                                (Eq. 6)
    L = L_DPL* + beta L_REG                                                                                  (Eq. 7)

Updates: all parameters, with running statistics. Needs: a linear classifier. Output: from before the update. The memory
starts as a copy of the classifier's rows, is updated first and then used; its history carries no gradient. Where the
classifier is frozen (scope="affine") the fresh batch mean does, or L_REG would be a constant there (`memory_grad`).
"""

from typing import TypeVar

from torch import Tensor

from dpl.methods.base import Objective
from dpl.methods.prototypes import DPLTerm, MemorySettings, PrototypeMethod
from dpl.methods.registry import register
from dpl.network import Network

__all__ = ["DPL"]

M = TypeVar("M", bound=MemorySettings)


@register(
    "dpl",
    paper="Wang et al., Decoupled Prototype Learning, 2024 (Eq. 7)",
    updates="all parameters, class memory",
    passes="1 forward, 1 backward",
    needs_classifier=True,
)
class DPL(PrototypeMethod[M]):
    """Eq. 7."""

    settings_class = MemorySettings

    def __init__(self, network: Network, settings: M) -> None:
        super().__init__(network, settings)
        self.term = DPLTerm(network, settings, self.random)
        self.declare_part("term", self.term)

    def prototype_loss(self, features: Tensor, labels: Tensor, originals: int) -> Objective:
        """Return Eq. 7."""
        return self.term.objective(features, labels, originals)
