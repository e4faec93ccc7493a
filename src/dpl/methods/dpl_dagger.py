"""DPL-dagger: DPL that also sees its confident samples in the style of unconfident ones (Section III-B of the paper).

Wang, Ding, Tan, Tan, Decoupled Prototype Learning for Reliable Test-Time Adaptation, 2024.

    mu(F), sigma(F): mean and deviation of each channel over space, at the end of the first stage          (Eq. 8, 9)
    F^a -> sigma(F^b) (F^a - mu(F^a)) / sigma(F^a) + mu(F^b),   a confident, b drawn from the unconfident  (Eq. 10)

Everything else is dpl's. `style="two_pass"` draws b from the same batch; `style="carry_over"` draws it from the last
batch, the variant of the paper's discussion, by its means and deviations. BatchNorm statistics are those of the
batch's own images, so predictions are the ones of dpl. Without an unconfident sample the batch is treated as by dpl.
On a CPU the confident samples alone are restyled; elsewhere their number would have to be read, so all are, and the
copies of the others get no label.
"""

from dataclasses import dataclass

from dpl.methods.dpl import DPL, DPLSettings
from dpl.methods.registry import register

__all__ = ["DPLDagger", "DPLDaggerSettings"]


@dataclass(frozen=True, kw_only=True)
class DPLDaggerSettings(DPLSettings, style="two_pass"):
    """Settings of DPL with style transfer."""


@register(
    "dpl_dagger",
    paper="Wang et al., Decoupled Prototype Learning, 2024 (Eq. 7 to 10)",
    updates="all parameters, class memory",
    passes="1 forward, 2 forward and 1 backward of the confident",
    needs_classifier=True,
)
class DPLDagger(DPL):
    """Eq. 7 with style transfer."""

    settings_class = DPLDaggerSettings
