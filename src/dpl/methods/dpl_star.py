"""DPL*: each prototype against all its confident samples together and all the others (Eq. 4).

Wang et al., Decoupled Prototype Learning for Reliable Test-Time Adaptation, 2024.

    L = -(1/C') sum_k log  sum over Z+ of e^{<w_k, z_i>/tau}  /  sum over all z_j of e^{<w_k, z_j>/tau}

Updates, needs, output and empty cases are those of dpl_o.
"""

from torch import Tensor

from dpl.methods.base import Objective
from dpl.methods.prototypes import PrototypeMethod, PrototypeSettings
from dpl.methods.registry import register
from dpl.objectives import classes_present, dpl_star

__all__ = ["DPLStar"]


@register(
    "dpl_star",
    paper="Wang et al., Decoupled Prototype Learning, 2024 (Eq. 4)",
    updates="all parameters",
    passes="1 forward, 1 backward",
    needs_classifier=True,
)
class DPLStar(PrototypeMethod[PrototypeSettings]):
    """Eq. 4."""

    def prototype_loss(self, features: Tensor, labels: Tensor, originals: int) -> Objective:
        """Return Eq. 4 over the classes present."""
        loss = dpl_star(features, self.network.prototypes, labels, self.settings.temperature)
        present = classes_present(labels)
        return Objective(loss, present > 1, {"classes": present})
