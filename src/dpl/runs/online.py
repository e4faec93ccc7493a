"""One pass over a stream: predict each batch when it comes, adapt, count."""

import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dpl.model.adaptive import AdaptiveModel
from dpl.runs.costs import Work
from dpl.runs.live import numbers

__all__ = ["OnlineResult", "evaluate"]

OnBatch = Callable[["OnlineResult"], None]


@dataclass
class OnlineResult:
    """What was predicted, in stream order."""

    predictions: list[int] = field(default_factory=list)
    labels: list[int] = field(default_factory=list)
    confidences: list[float] = field(default_factory=list)
    updates: int = 0
    batches: int = 0
    seconds: float = 0.0  # inside the model, without loading
    reasons: Counter[str] = field(default_factory=Counter)  # why batches brought no update
    work: Work = field(default_factory=Work)
    latest: dict[str, float] = field(default_factory=dict)  # figures of the last batch

    @property
    def correct(self) -> NDArray[np.bool_]:
        """Whether each prediction was right."""
        return np.equal(self.predictions, self.labels)

    @property
    def accuracy(self) -> float:
        """Online accuracy in percent."""
        return 100.0 * float(self.correct.mean()) if self.labels else float("nan")

    def cumulative(self) -> NDArray[np.float64]:
        """Accuracy in percent over the stream so far, after each image."""
        return 100.0 * np.cumsum(self.correct) / np.arange(1, len(self.labels) + 1)

    def tail(self, count: int) -> float:
        """Accuracy in percent over the last `count` images."""
        return 100.0 * float(self.correct[-count:].mean())


def evaluate(
    model: AdaptiveModel, batches: Iterable[tuple[Tensor, Tensor]], on_batch: OnBatch | None = None
) -> OnlineResult:
    """Run a labelled stream through an adaptive model; labels are only compared with its answers."""
    result = OnlineResult()
    for images, labels in batches:
        start = time.perf_counter()
        with result.work.counted(len(images)):
            logits = model(images)
        if logits.is_cuda:
            torch.cuda.synchronize(logits.device)  # a clock would be read before the work is done
        result.seconds += time.perf_counter() - start
        top, predicted = torch.softmax(logits.float(), dim=1).max(dim=1)
        result.predictions += predicted.tolist()
        result.confidences += top.tolist()
        result.labels += labels.tolist()
        result.batches += 1
        if model.last.get("updated", False):
            result.updates += 1
        else:
            result.reasons[str(model.last.get("reason", "no reason was given"))] += 1
        if on_batch is not None:
            result.latest = numbers(model.last) | {"confidence": float(top.mean())}
            on_batch(result)
    return result
