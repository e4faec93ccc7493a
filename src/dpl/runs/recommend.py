"""Which parts of the default method matter for a set of images?

Without labels nobody knows which prediction is right. What can be counted is how many predictions a part changes: one
that changes none costs time for nothing.
"""

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dpl.core.errors import DataError
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
    """The default method with the parts that matter, as `dpl.adapt` takes it."""

    images: int
    agreement: float  # share of the default method's predictions that are the source model's
    parts: list[PartResult]
    method: str = DEFAULT_METHOD

    @property
    def settings(self) -> dict[str, Any]:
        """The settings that leave out what does not matter."""
        return {name: value for part in self.parts if not part.matters for name, value in part.without.items()}

    @property
    def why(self) -> list[str]:
        """The reasons, as sentences."""
        head = f"{self.method} agrees with the source model on {self.agreement:.1%} of {self.images} images"
        told = (
            f"{part.part}: {part.changed:.1%} of the predictions changed by it{'' if part.matters else '; left out'}"
            for part in self.parts
        )
        return [head, *told]

    @property
    def call(self) -> str:
        """The line of Python that follows the recommendation."""
        arguments = "".join(f", {name}={value!r}" for name, value in self.settings.items())
        return f"dpl.adapt(model, {self.method!r}{arguments})"

    def as_dict(self) -> dict[str, Any]:
        """Return it as plain data."""
        return asdict(self) | {"settings": self.settings, "why": self.why, "call": self.call}


def recommend(
    model: nn.Module,
    batches: Iterable[Tensor],
    *,
    calibrate: Source | tuple[Tensor, Tensor] | None = None,
    classifier: str | None = None,
) -> Recommendation:
    """Run the default method on batches of images, whole and without each part; `model` is not changed."""
    common: dict[str, Any] = {"classifier": classifier, "calibrate": calibrate}
    models = {"source": adapt(model, "source", **common), "whole": adapt(model, **common)}
    models |= {part: adapt(model, **common, **without) for part, without in PARTS.items()}
    answers = _answers(models, batches)
    whole, source = answers["whole"], answers["source"]
    parts = [
        PartResult(part, without, _share(answers[part] != whole), _share(answers[part] == source))
        for part, without in PARTS.items()
    ]
    return Recommendation(len(source), _share(whole == source), parts)


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
