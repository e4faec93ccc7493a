"""Which method and settings suit a set of images? The automatic choice, asked for its reasons."""

from collections.abc import Iterable

from torch import Tensor, nn

from dpl.auto import Auto, Recommendation
from dpl.core.errors import DataError
from dpl.methods.base import Source
from dpl.model.adaptive import adapt

__all__ = ["recommend"]


def recommend(
    model: nn.Module,
    batches: Iterable[Tensor],
    *,
    calibrate: Source | tuple[Tensor, Tensor] | None = None,
    classifier: str | None = None,
) -> Recommendation:
    """Let the automatic choice meet batches of images, and return what it chose and why; `model` is not changed."""
    adaptive = adapt(model, calibrate=calibrate, classifier=classifier)
    seen = 0
    for images in batches:
        adaptive(images)
        seen += len(images)
    if not seen:
        raise DataError("batches: there was no image to choose by; pass at least one batch")
    if not isinstance(adaptive.method, Auto):
        raise TypeError("the default method is no longer the automatic choice")
    return adaptive.method.recommendation()
