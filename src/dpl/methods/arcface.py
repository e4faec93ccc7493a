"""ArcFace on confident pseudo-labels: one of the two prototype losses that the DPL paper compares its own with.

Deng, Guo, Xue, Zafeiriou, ArcFace: Additive Angular Margin Loss for Deep Face Recognition, CVPR 2019.

    L = -(1/N) sum over {i : max p_i > alpha} of log [ e_y / (e_y + sum_{k != y} exp(s cos t_k)) ],
    e_y = exp(s cos(t_y + m))

with t_k the angle between the feature z_i and the classifier's row w_k, and y = argmax p_i. The DPL paper sets m = 0
and does not name s, for which ArcFace's own 64 is taken; all else is as for `pl`.

Updates: all parameters, with the source's running statistics. Needs: a linear classifier. Output: the ordinary logits
W z + b, from before the last update. A batch without a confident sample changes nothing.
"""

from dataclasses import dataclass

from torch import Tensor

from dpl.core.settings import setting
from dpl.methods.base import GradientMethod, Objective
from dpl.methods.registry import register
from dpl.methods.settings import GradientSettings
from dpl.network import Pass
from dpl.objectives import confident_labels
from dpl.objectives.proxy import arcface

__all__ = ["ArcFace", "ArcFaceSettings"]


@dataclass(frozen=True, kw_only=True)
class ArcFaceSettings(GradientSettings, lr=5e-5, scope="all"):
    """Settings of ArcFace."""

    confidence: float = setting(0.9, "alpha: samples with a probability above it take part", low=0, high=1)
    scale: float = setting(64.0, "s: multiplies the cosines", low=1e-4)
    margin: float = setting(0.0, "m: angle in radians added to that of the own prototype", low=0, high=3.14)


@register(
    "arcface",
    paper="Deng et al., ArcFace, CVPR 2019 (as compared in the DPL paper)",
    updates="all parameters",
    passes="1 forward, 1 forward and backward of the confident",
    needs_classifier=True,
)
class ArcFace(GradientMethod[ArcFaceSettings]):
    """Angular cross-entropy over the confident."""

    settings_class = ArcFaceSettings

    def candidates(self, out: Pass) -> Tensor:
        """The confident samples."""
        return confident_labels(out.reference, self.settings.confidence) >= 0

    def loss(self, out: Pass) -> Objective:
        """Angular cross-entropy over the confident."""
        s = self.settings
        labels = confident_labels(out.reference, s.confidence)
        confident = labels >= 0
        value = arcface(out.z, self.network.prototypes, labels, s.scale, s.margin)
        return Objective(value, confident.any(), {"confident": out.share(confident)})
