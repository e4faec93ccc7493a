"""DPL-dagger: DPL that also sees its confident samples in the style of unconfident ones (Eq. 8 to 10).

Wang et al., Decoupled Prototype Learning for Reliable Test-Time Adaptation, 2024.

    F^a -> sigma(F^b) (F^a - mu(F^a)) / sigma(F^a) + mu(F^b)      at the end of the network's first stage

Everything else is dpl's. `style="two_pass"` is the paper's main way, `style="carry_over"` the single-pass variant of
its discussion. Without an unconfident sample the batch is treated as by dpl.
"""

from dataclasses import dataclass

from dpl.methods.dpl import DPL
from dpl.methods.prototypes import MemorySettings
from dpl.methods.registry import register

__all__ = ["DPLDagger", "DPLDaggerSettings"]


@dataclass(frozen=True, kw_only=True)
class DPLDaggerSettings(MemorySettings, style="two_pass"):
    """Settings of DPL with style transfer."""


@register(
    "dpl_dagger",
    paper="Wang et al., Decoupled Prototype Learning, 2024 (Eq. 7 to 10)",
    updates="all parameters, class memory",
    passes="1 forward, 1 more of the confident from the first stage on, 1 backward",
    needs_classifier=True,
)
class DPLDagger(DPL[DPLDaggerSettings]):
    """Eq. 7 with style transfer."""

    settings_class = DPLDaggerSettings
