"""The uncertainty that entropy methods minimise: the entropy of the prediction, or of COME's opinion."""

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from dpl.core.settings import setting
from dpl.methods.settings import GradientSettings
from dpl.objectives import entropy, opinion_entropy

__all__ = ["UncertaintySettings"]


@dataclass(frozen=True, kw_only=True)
class UncertaintySettings(GradientSettings):
    """Settings of a method that minimises an uncertainty."""

    objective: Literal["entropy", "come"] = setting(
        "entropy", "the uncertainty: entropy of the prediction, or of COME's opinion", later=True
    )
    opinion_mass: float | None = setting(
        None, "COME's K: weight of not knowing; None: number of classes (the authors: 1000)", low=1e-3, later=True
    )

    def uncertainty(self, logits: Tensor) -> Tensor:
        """Return the uncertainty of each row, [B, C] -> [B]."""
        return entropy(logits) if self.objective == "entropy" else opinion_entropy(logits, self.opinion_mass)
