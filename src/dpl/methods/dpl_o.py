"""DPL-o: each confident sample against those of other classes, as seen by its own prototype (Eq. 3).

Wang et al., Decoupled Prototype Learning for Reliable Test-Time Adaptation, 2024.

    L = -(1/N) sum_i log  e^{<w+, z_i>/tau} / (e^{<w+, z_i>/tau} + sum over z_j in Z- of e^{<w+, z_j>/tau})

Updates: all parameters, with running statistics (the paper's setting on domain generalisation; on corruptions it uses
norm="batch", scope="affine", lr=1e-3). Needs: a linear classifier. Output: from before the update. No public code
exists; where the paper is silent the choices are listed in docs/dpl.md. One class alone, or no confident sample,
leaves nothing to contrast: no step is taken.
"""

from torch import Tensor

from dpl.methods.base import Objective
from dpl.methods.parts.prototype_family import PrototypeMethod, PrototypeSettings, PrototypeTerm
from dpl.methods.registry import register
from dpl.network import Pass
from dpl.objectives import dpl_o

__all__ = ["DPLo", "DPLoTerm"]


class DPLoTerm(PrototypeTerm[PrototypeSettings]):
    """Eq. 3."""

    def loss(self, out: Pass, labels: Tensor) -> Objective:
        """Eq. 3 over the confident samples."""
        return Objective(dpl_o(out.z, self.network.prototypes, labels, self.settings.temperature))


@register(
    "dpl_o",
    paper="Wang et al., Decoupled Prototype Learning, 2024 (Eq. 3)",
    updates="all parameters",
    passes="1 forward, 1 forward and backward of the confident",
    needs_classifier=True,
)
class DPLo(PrototypeMethod[PrototypeSettings]):
    """Eq. 3."""

    term_class = DPLoTerm
