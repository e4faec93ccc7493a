"""DPL*: each prototype against all its confident samples together and all the others (Eq. 4).

Wang et al., Decoupled Prototype Learning for Reliable Test-Time Adaptation, 2024.

    L = -(1/C') sum_k log  sum over Z+ of e^{<w_k, z_i>/tau}  /  sum over all z_j of e^{<w_k, z_j>/tau}

Updates, needs, output and empty cases are those of dpl_o.
"""

from torch import Tensor

from dpl.methods.base import Objective
from dpl.methods.parts.prototype_family import PrototypeMethod, PrototypeSettings, PrototypeTerm
from dpl.methods.registry import register
from dpl.network import Pass
from dpl.objectives import dpl_star

__all__ = ["DPLStar", "DPLStarTerm"]


class DPLStarTerm(PrototypeTerm[PrototypeSettings]):
    """Eq. 4."""

    def loss(self, out: Pass, labels: Tensor) -> Objective:
        """Eq. 4 over the confident samples."""
        return Objective(dpl_star(out.z, self.network.prototypes, labels, self.settings.temperature))


@register(
    "dpl_star",
    paper="Wang et al., Decoupled Prototype Learning, 2024 (Eq. 4)",
    updates="all parameters",
    passes="1 forward, 1 forward and backward of the confident",
    needs_classifier=True,
)
class DPLStar(PrototypeMethod[PrototypeSettings]):
    """Eq. 4."""

    term_class = DPLStarTerm
