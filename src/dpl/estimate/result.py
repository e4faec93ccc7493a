"""The answer to: how accurate is the model now, and would the source model be better?"""

from dataclasses import asdict, dataclass
from typing import Any

__all__ = ["BETTER", "UNSURE", "WORSE", "Estimate", "nothing_watched"]

BETTER, WORSE, UNSURE = "better", "worse", "unsure"


@dataclass(frozen=True)
class Estimate:
    """Estimated without labels, from the images that were looked at last; accuracies are in percent.

    Accuracies are None without labelled source data (`calibrate=`): then only the verdict is known.
    """

    accuracy: float | None  # of the adapted model
    low: float | None  # 90 % interval of it
    high: float | None
    source: float | None  # of the unadapted model on the same images
    rows: int  # images looked at
    difference: float | None  # adapted minus source, in points
    verdict: str  # is the adapted model "better" or "worse" than the source model, or "unsure"
    reason: str  # of the verdict, and why there is no number

    def as_dict(self) -> dict[str, Any]:
        """Return it as plain data, for records and metrics."""
        return asdict(self)

    def __str__(self) -> str:
        """Return one line for a person."""
        if self.accuracy is None or self.low is None or self.high is None or self.source is None:
            return f"{self.verdict}: {self.reason}"
        which = "unsure which is better" if self.verdict == UNSURE else f"{self.verdict} than the source model"
        return (
            f"{self.accuracy:.1f} % ({self.low:.1f} to {self.high:.1f}), source model {self.source:.1f} %, "
            f"{which}, from {self.rows} images"
        )


def nothing_watched() -> Estimate:
    """Return what can be said about a model that was not watched."""
    reason = "the stream was not watched; pass calibrate= (labelled source data) or estimate=True to dpl.adapt"
    return Estimate(None, None, None, None, 0, None, UNSURE, reason)
