"""SHOT-IM: make each prediction sure and the predicted classes balanced (information maximisation).

Liang, Hu, Feng, Do We Really Need to Access the Source Data?, ICML 2020; as an online method in the T3A library,
which is what the DPL paper compares with.

    L_IM = (1/B) sum_i H(p_i) + sum_c q_c log(q_c + 1e-5),    q = (1/B) sum_i p_i

Updates: the features (the classifier is the frozen source hypothesis), with the source's running statistics. Needs: a
classifier to tell apart from the features. Output: from before the last update. The authors' own SHOT is
offline, in many epochs, with a bottleneck and a learning-rate schedule; this is the one-pass version. Departure: a
batch of one changes nothing; the two terms cancel there up to the 1e-5, and Adam would make full steps of that rest.
The TSD repository's version is `norm="track", lr=1e-4`.
"""

from dataclasses import dataclass

import torch

from dpl.methods.base import GradientMethod, Objective
from dpl.methods.registry import register
from dpl.methods.settings import GradientSettings
from dpl.network import Pass
from dpl.objectives import entropy, marginal_entropy

__all__ = ["ShotIM", "ShotIMSettings"]


@dataclass(frozen=True, kw_only=True)
class ShotIMSettings(GradientSettings, lr=5e-5, scope="features"):
    """Settings of SHOT-IM."""


@register(
    "shot_im",
    paper="Liang et al., Do We Really Need to Access the Source Data?, ICML 2020 (as in the T3A library)",
    updates="features",
    passes="1 forward, 1 backward",
    needs_classifier=True,
)
class ShotIM(GradientMethod[ShotIMSettings]):
    """Information maximisation."""

    settings_class = ShotIMSettings

    def loss(self, out: Pass) -> Objective:
        """Mean entropy minus the entropy of the mean."""
        sure, balanced = entropy(out.logits).mean(), marginal_entropy(out.logits)
        should_step = None if len(out.logits) > 1 else torch.zeros((), dtype=torch.bool, device=out.logits.device)
        return Objective(
            sure - balanced, should_step, {"entropy": sure.detach(), "marginal_entropy": balanced.detach()}
        )
