"""TENT: minimise the entropy of the predictions through the normalisation layers' affine parameters.

Wang et al., Tent: Fully Test-Time Adaptation by Entropy Minimization, ICLR 2021.

    L = (1/B) sum_i H(softmax(f(x_i)))

`objective="come"` minimises COME's uncertainty (dpl.methods.come) instead. Updates: affine parameters of normalisation
layers, with batch statistics. Needs: such layers. Output: from before the update. Departure from the authors' code:
the network is in evaluation mode (no dropout), as in the later benchmark libraries; numbers are the same without
dropout.
"""

from dataclasses import dataclass
from typing import ClassVar

from dpl.methods.base import GradientMethod, Objective
from dpl.methods.parts.uncertainty import UncertaintySettings
from dpl.methods.registry import register
from dpl.methods.settings import Settings
from dpl.network import Pass

__all__ = ["Tent", "TentSettings"]


@dataclass(frozen=True, kw_only=True)
class TentSettings(UncertaintySettings, norm="batch"):
    """Settings of TENT."""


@register(
    "tent",
    paper="Wang et al., Tent: Fully Test-Time Adaptation by Entropy Minimization, ICLR 2021",
    updates="affine parameters of normalisation layers",
    passes="1 forward, 1 backward",
)
class Tent(GradientMethod[TentSettings]):
    """Entropy minimisation."""

    settings_class: ClassVar[type[Settings]] = TentSettings

    def loss(self, out: Pass) -> Objective:
        """Mean uncertainty."""
        return Objective(self.settings.uncertainty(out.logits).mean())
