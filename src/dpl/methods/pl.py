"""PL: fit the confident pseudo-labels with cross-entropy.

Lee, Pseudo-Label: The Simple and Efficient Semi-Supervised Learning Method, ICML workshop 2013; as a test-time
method in the T3A library, which is what the DPL paper compares with.

    L = -(1/N) sum over {i : max p_i > alpha} of log p_i[argmax p_i]                                        (Eq. 2)

Updates: all parameters, with the source's running statistics. Needs: nothing. Output: from before the last update.
Departure: a batch without a confident sample changes nothing. The T3A library computes a NaN there whose gradient is
zero, after which Adam still moves every weight by its momentum; `authors=True` does the same.
"""

from dataclasses import dataclass

from torch import Tensor

from dpl.core.settings import setting
from dpl.methods.base import GradientMethod, Objective
from dpl.methods.registry import register
from dpl.methods.settings import GradientSettings
from dpl.network import Pass
from dpl.objectives import confident_cross_entropy, confident_labels

__all__ = ["PL", "PLSettings"]


@dataclass(frozen=True, kw_only=True)
class PLSettings(GradientSettings, lr=5e-5, scope="all"):
    """Settings of PL."""

    confidence: float = setting(0.9, "alpha: pseudo-labels with a probability above it are used", low=0, high=1)
    authors: bool = setting(False, "let the optimizer step on empty selections, as the T3A library does")


@register(
    "pl",
    paper="Lee, Pseudo-Label, ICML workshop 2013 (as in the T3A library)",
    updates="all parameters",
    passes="1 forward, 1 forward and backward of the confident",
)
class PL(GradientMethod[PLSettings]):
    """Cross-entropy on confident pseudo-labels."""

    settings_class = PLSettings

    def candidates(self, out: Pass) -> Tensor:
        """The confident samples."""
        return confident_labels(out.reference, self.settings.confidence) >= 0

    def loss(self, out: Pass) -> Objective:
        """Cross-entropy over the confident."""
        labels = confident_labels(out.reference, self.settings.confidence)
        confident = labels >= 0
        should_step = None if self.settings.authors else confident.any()
        return Objective(confident_cross_entropy(out.logits, labels), should_step, {"confident": out.share(confident)})
