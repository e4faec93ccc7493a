"""DPL*: each prototype against all its confident samples together and all the others (Eq. 4).

Wang et al., Decoupled Prototype Learning for Reliable Test-Time Adaptation, 2024.

    L = -(1/C') sum_k log  sum over Z+ of e^{<w_k, z_i>/tau}  /  sum over all z_j of e^{<w_k, z_j>/tau}

Updates, needs, output and empty cases are those of dpl_o.
"""

from dpl.methods.base import Fact, Objective
from dpl.methods.dpl import PrototypeMethod, PrototypeSettings
from dpl.methods.registry import register
from dpl.network import Pass
from dpl.objectives import classes_present, confident_labels, dpl_star

__all__ = ["DPLStar"]


@register(
    "dpl_star",
    paper="Wang et al., Decoupled Prototype Learning, 2024 (Eq. 4)",
    updates="all parameters",
    passes="1 forward, 1 forward and backward of the confident",
    needs_classifier=True,
)
class DPLStar(PrototypeMethod[PrototypeSettings]):
    """Eq. 4."""

    def loss(self, out: Pass) -> Objective:
        """Eq. 4 over the confident samples."""
        s = self.settings
        labels = confident_labels(out.reference, s.confidence)
        present = classes_present(labels)
        facts: dict[str, Fact] = {"confident": out.share(labels >= 0), "classes": present}
        return Objective(dpl_star(out.z, self.network.prototypes, labels, s.temperature), present > 1, facts)
