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
from dpl.methods.prototypes import PrototypeMethod, PrototypeSettings
from dpl.methods.registry import register
from dpl.objectives import classes_present, dpl_o

__all__ = ["DPLo"]


@register(
    "dpl_o",
    paper="Wang et al., Decoupled Prototype Learning, 2024 (Eq. 3)",
    updates="all parameters",
    passes="1 forward, 1 backward",
    needs_classifier=True,
)
class DPLo(PrototypeMethod[PrototypeSettings]):
    """Eq. 3."""

    def prototype_loss(self, features: Tensor, labels: Tensor, originals: int) -> Objective:
        """Return Eq. 3 over the confident samples."""
        loss = dpl_o(features, self.network.prototypes, labels, self.settings.temperature)
        present = classes_present(labels)
        return Objective(loss, present > 1, {"classes": present})
