"""The online loop: predict each batch when it comes, let the model adapt to it, and say what happened."""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dpl.model.adaptive import AdaptiveModel
from dpl.runs.costs import Pace, Work

__all__ = ["BatchResult", "OnlineResult", "evaluate", "online", "send"]

B = TypeVar("B")


@dataclass(frozen=True)
class BatchResult(Generic[B]):
    """What came of one batch."""

    batch: B  # what was given beside the images, such as their labels
    predictions: list[int]
    confidences: list[float]
    seconds: float  # inside the model, without loading; on a GPU with the copy of the images
    skipped_because: str | None  # why the model was not updated; None if it was
    log_probabilities: Tensor  # of all classes [B, C], in single precision


def online(
    model: AdaptiveModel, batches: Iterable[tuple[Tensor, B]], work: Work | None = None, pace: Pace | None = None
) -> Iterator[BatchResult[B]]:
    """Predict and adapt batch by batch on the model's device; `work` counts operations, `pace` says when to adapt."""
    work = work or Work()
    for images, batch in batches:
        images = send(images, model.device)
        start = time.perf_counter()
        with work.counted(len(images)):
            logits = model(images) if pace is None else pace.run(model, images)
        if logits.is_cuda:
            torch.cuda.synchronize(logits.device)  # the clock would otherwise be read before the work is done
        seconds = time.perf_counter() - start
        logits = logits.float()
        confidences, predictions = torch.softmax(logits, dim=1).max(dim=1)
        reason = None if model.last.get("updated", False) else str(model.last.get("reason", "no reason was given"))
        if pace is not None and pace.missed:
            reason = "the stream did not wait"
        log_probabilities = torch.log_softmax(logits, dim=1)
        yield BatchResult(batch, predictions.tolist(), confidences.tolist(), seconds, reason, log_probabilities)


def send(images: Tensor, device: torch.device) -> Tensor:
    """Send images to a device; a copy to a GPU starts from pinned memory, and this process does not wait for it."""
    if device.type == "cuda" and not images.is_cuda:  # has not run so far: no GPU was at hand
        return images.pin_memory().to(device, non_blocking=True)
    return images.to(device)


@dataclass
class OnlineResult:
    """What was predicted on a labelled stream, in stream order."""

    predictions: list[int] = field(default_factory=list)
    labels: list[int] = field(default_factory=list)
    confidences: list[float] = field(default_factory=list)
    log_likelihoods: list[float] = field(default_factory=list)  # of the true class; of no use where none is known
    updates: int = 0
    batches: int = 0
    seconds: float = 0.0  # inside the model, without loading
    reasons: Counter[str] = field(default_factory=Counter)  # why batches brought no update
    work: Work = field(default_factory=Work)

    def add(self, result: BatchResult[Tensor]) -> None:
        """Append the result of a batch that came with its labels."""
        self.predictions += result.predictions
        self.confidences += result.confidences
        self.labels += result.batch.tolist()
        true = result.batch.to(result.log_probabilities.device).clamp(min=0)
        self.log_likelihoods += result.log_probabilities.gather(1, true[:, None]).flatten().tolist()
        self.batches += 1
        self.seconds += result.seconds
        if result.skipped_because is None:
            self.updates += 1
        else:
            self.reasons[result.skipped_because] += 1

    @property
    def correct(self) -> NDArray[np.bool_]:
        """Whether each prediction was right."""
        return np.equal(self.predictions, self.labels)

    @property
    def known(self) -> NDArray[np.bool_]:
        """Whether each image is of a known class."""
        return np.asarray(self.labels) >= 0

    @property
    def accuracy(self) -> float:
        """Online accuracy in percent."""
        return 100.0 * float(self.correct[self.known].mean()) if self.known.any() else float("nan")

    def cumulative(self) -> NDArray[np.float64]:
        """Accuracy in percent over the stream so far, after each image."""
        return 100.0 * np.cumsum(self.correct) / np.arange(1, len(self.labels) + 1)

    def tail(self, count: int) -> float:
        """Accuracy in percent over the last `count` images."""
        return 100.0 * float(self.correct[-count:].mean())


def evaluate(
    model: AdaptiveModel,
    batches: Iterable[tuple[Tensor, Tensor]],
    on_batch: Callable[[OnlineResult], None] = lambda result: None,
    pace: Pace | None = None,
) -> OnlineResult:
    """Run a labelled stream through an adaptive model; labels, -1 for no known class, are only compared with it."""
    collected = OnlineResult()
    for result in online(model, batches, collected.work, pace):
        collected.add(result)
        on_batch(collected)
    return collected
