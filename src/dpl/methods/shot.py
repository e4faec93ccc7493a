"""SHOT: information maximisation plus cross-entropy on the confident pseudo-labels.

Liang, Hu, Feng, Do We Really Need to Access the Source Data?, ICML 2020; as an online method in the T3A library,
which is what the DPL paper compares with.

    L = L_IM + theta L_CE,    L_IM as in `shot_im`, L_CE as in `pl`

Updates: the features (the classifier is the frozen source hypothesis), with the source's running statistics. Needs: a
classifier to tell apart from the features. Output: from before the last update. The authors' own SHOT is
offline and labels by clustering the whole target set; this is the one-pass version, with the arg-max of confident
samples as labels. Departures: a batch without a confident sample has the loss L_IM; the T3A library records a NaN
there, but its gradient is the same. One unconfident sample alone changes nothing (see `shot_im`).
"""

from dataclasses import dataclass

from dpl.core.settings import setting
from dpl.methods.base import GradientMethod, Objective
from dpl.methods.registry import register
from dpl.methods.shot_im import ShotIMSettings
from dpl.network import Pass
from dpl.objectives import confident_cross_entropy, confident_labels, entropy, marginal_entropy

__all__ = ["Shot", "ShotSettings"]


@dataclass(frozen=True, kw_only=True)
class ShotSettings(ShotIMSettings):
    """Settings of SHOT."""

    confidence: float = setting(0.9, "pseudo-labels with a probability above it are used", low=0, high=1)
    label_weight: float = setting(0.1, "theta: weight of the cross-entropy on pseudo-labels", low=0)


@register(
    "shot",
    paper="Liang et al., Do We Really Need to Access the Source Data?, ICML 2020 (as in the T3A library)",
    updates="features",
    passes="1 forward, 1 backward",
    needs_classifier=True,
)
class Shot(GradientMethod[ShotSettings]):
    """Information maximisation with pseudo-labels."""

    settings_class = ShotSettings

    def loss(self, out: Pass) -> Objective:
        """Mean entropy minus the entropy of the mean, plus cross-entropy over the confident."""
        labels = confident_labels(out.logits, self.settings.confidence)
        information = entropy(out.logits).mean() - marginal_entropy(out.logits)
        fitted = confident_cross_entropy(out.logits, labels)
        return Objective(
            information + self.settings.label_weight * fitted,
            None if len(labels) > 1 else (labels >= 0).any(),
            {"information": information.detach(), "confident": (labels >= 0).float().mean()},
        )
