"""COME: conservative entropy minimisation, over opinions that may also say "I do not know".

Zhang et al., COME: Test-time Adaption by Conservatively Minimizing Entropy, ICLR 2025. The logits x of a sample keep
their length, x' = x |x| / |x| with the second length a constant, and become an opinion over C classes and the unknown:

    b_c = exp(x'_c) / S,   u = K / S,   S = sum_c exp(x'_c) + K,      L = mean_i H([b, u] + 1e-7)

The gradient cannot make logits longer, and a sample can be uncertain instead of being forced to a class. This is TENT
with that loss; `objective="come"` puts it into `tent`, `eta`, `eata` and `sar`. Updates: affine parameters of
normalisation layers, with batch statistics. Needs: such layers. Output: from before the update. The optimizer is that
of TENT here; the authors use SGD with momentum 0.9 and 2.5e-4 for ImageNet.
Departures from the authors' code: K is the number of classes (theirs is always 1000, with which ten classes reverse
the order of certain and uncertain samples; `opinion_mass=1000`); large and zero logits stay finite.
"""

from dataclasses import dataclass
from typing import Literal

from dpl.core.settings import setting
from dpl.methods.registry import register
from dpl.methods.tent import Tent, TentSettings

__all__ = ["COME", "COMESettings"]


@dataclass(frozen=True, kw_only=True)
class COMESettings(TentSettings):
    """Settings of COME."""

    objective: Literal["come"] = setting("come", "the uncertainty: the entropy of an opinion", choices=("come",))


@register(
    "come",
    paper="Zhang et al., COME: Test-time Adaption by Conservatively Minimizing Entropy, ICLR 2025",
    updates="affine parameters of normalisation layers",
    passes="1 forward, 1 backward",
)
class COME(Tent):
    """Conservative entropy minimisation."""

    settings_class = COMESettings
