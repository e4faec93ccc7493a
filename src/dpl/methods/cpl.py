"""CPL: fit the pseudo-labels that are conjugate to the loss with which the source was trained.

Goyal, Sun, Raghunathan, Kolter, Test-Time Adaptation via Conjugate Pseudo-labels, NeurIPS 2022.

    h = f(x) / T,    p = softmax(h),    y solves (I + eps diag(p) - eps p p^T) y = p
    L = (1/B) sum_i [ log sum_k exp(h_k) - sum_k y_k (h_k - eps (1 - p_k)) ]

for a source trained with PolyLoss of first coefficient eps. For a source trained with cross-entropy eps = 0, y = p and
L is the entropy: at T = 1 CPL is then TENT with another optimizer and with the output of a second pass.

Updates: affine parameters of normalisation layers, with batch statistics. Needs: such layers. Output: from after the
update, by a second forward pass, as in the authors' code. Departure: y is written down in closed form (see
`dpl.objectives.conjugate_loss`) where the authors solve a linear system for each sample; batches of one work.
"""

from dataclasses import dataclass

from dpl.core.settings import setting
from dpl.methods.base import GradientMethod, Objective
from dpl.methods.registry import register
from dpl.methods.settings import GradientSettings
from dpl.network import Pass
from dpl.objectives import conjugate_loss

__all__ = ["CPL", "CPLSettings"]


@dataclass(frozen=True, kw_only=True)
class CPLSettings(GradientSettings, norm="batch", optimizer="nesterov", output="after"):
    """Settings of CPL."""

    epsilon: float = setting(
        0.0, "first coefficient of the PolyLoss the source was trained with; 0: cross-entropy", low=0
    )
    temperature: float = setting(1.0, "T: divides the logits", low=1e-4)


@register(
    "cpl",
    paper="Goyal et al., Test-Time Adaptation via Conjugate Pseudo-labels, NeurIPS 2022",
    updates="affine parameters of normalisation layers",
    passes="2 forwards, 1 backward",
)
class CPL(GradientMethod[CPLSettings]):
    """Conjugate pseudo-labels."""

    settings_class = CPLSettings

    def loss(self, out: Pass) -> Objective:
        """Mean conjugate loss."""
        return Objective(conjugate_loss(out.logits, self.settings.epsilon, self.settings.temperature).mean())
