"""Is the default method better than the source model on a set of images, and which of its parts matter?

The first is asked of `model.estimate()`. For the second, predictions are counted: a part that changes none costs time
for nothing.
"""

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dpl.core.errors import DataError
from dpl.estimate import Estimate
from dpl.estimate.result import WORSE
from dpl.methods.base import Source
from dpl.model.adaptive import DEFAULT_METHOD, AdaptiveModel, adapt

__all__ = ["PARTS", "PartResult", "Recommendation", "recommend"]

# What takes a part of the default method away.
PARTS: dict[str, dict[str, Any]] = {
    "batch statistics": {"norm": "running"},
    "learning": {"loss": "none"},
    "answers of the memory": {"answer": "classifier"},
}
_MATTERS = 0.01  # share of predictions that a part must change


@dataclass(frozen=True)
class PartResult:
    """The default method with one part taken away."""

    part: str
    without: dict[str, Any]  # settings that take it away
    changed: float  # share of predictions that the part changes
    agreement: float  # share of predictions without it that are the source model's

    @property
    def matters(self) -> bool:
        """Whether the part changes enough predictions."""
        return self.changed >= _MATTERS


@dataclass(frozen=True)
class Recommendation:
    """The default method with the parts that matter, or the source model, as `dpl.adapt` takes it."""

    images: int
    agreement: float  # share of the default method's predictions that are the source model's
    parts: list[PartResult]
    estimate: Estimate  # of the default method

    @property
    def method(self) -> str:
        """The default method, unless the source model is estimated to be better."""
        return "source" if self.estimate.verdict == WORSE else DEFAULT_METHOD

    @property
    def settings(self) -> dict[str, Any]:
        """The settings that leave out what does not matter."""
        if self.method == "source":
            return {}
        return {name: value for part in self.parts if not part.matters for name, value in part.without.items()}

    @property
    def why(self) -> list[str]:
        """The reasons, as sentences."""
        head = f"{DEFAULT_METHOD} agrees with the source model on {self.agreement:.1%} of {self.images} images"
        told = (
            f"{part.part}: {part.changed:.1%} of the predictions changed by it{'' if part.matters else '; left out'}"
            for part in self.parts
        )
        return [f"estimate of {DEFAULT_METHOD}: {self.estimate}", head, *told]

    @property
    def call(self) -> str:
        """The line of Python that follows the recommendation."""
        arguments = "".join(f", {name}={value!r}" for name, value in self.settings.items())
        return f"dpl.adapt(model, {self.method!r}{arguments})"

    def as_dict(self) -> dict[str, Any]:
        """Return it as plain data."""
        return asdict(self) | {"method": self.method, "settings": self.settings, "why": self.why, "call": self.call}


def recommend(
    model: nn.Module,
    batches: Iterable[Tensor],
    *,
    calibrate: Source | tuple[Tensor, Tensor] | None = None,
    classifier: str | None = None,
) -> Recommendation:
    """Run the default method on batches of images, whole and without each part; `model` is not changed.

    Labelled source validation data (`calibrate`) make the estimate a percentage.
    """
    models = {
        "source": adapt(model, "source", classifier=classifier),
        "whole": adapt(model, classifier=classifier, calibrate=calibrate, estimate=True),
    }
    models |= {part: adapt(model, classifier=classifier, **without) for part, without in PARTS.items()}
    answers = _answers(models, batches)
    whole, source = answers["whole"], answers["source"]
    parts = [
        PartResult(part, without, _share(answers[part] != whole), _share(answers[part] == source))
        for part, without in PARTS.items()
    ]
    return Recommendation(len(source), _share(whole == source), parts, models["whole"].estimate())


def _answers(models: dict[str, AdaptiveModel], batches: Iterable[Tensor]) -> dict[str, Tensor]:
    """Return the classes that each model predicts, on the host."""
    answers: dict[str, list[Tensor]] = {name: [] for name in models}
    for images in batches:
        for name, model in models.items():
            answers[name].append(model(images).argmax(dim=1).cpu())
    if not answers["source"]:
        raise DataError("batches: there was no image to choose by; pass at least one batch")
    return {name: torch.cat(found) for name, found in answers.items()}


def _share(mask: Tensor) -> float:
    return float(mask.float().mean())
