"""Whether the latest images of a stream are of several classes, seen without a label.

A batch of one class holds no contrast, yet where the source model errs its predictions look like several classes, and
to learn from them does harm. What tells the two apart is how alike images become under batch statistics
(`EarlyBatch`): in all layers these push images of one class apart, in the early layers alone they do not. With a and b
the mean probability that two of m images are of the same class in these two cases, the images are not mixed if

    b - a > 0.3 a + 0.01 + c / m

c allows for chance. Once images are not mixed, nothing is learnt until two looks in a row find mixed ones: in class
order one look may see two classes. What was learnt goes, since earlier looks may have missed it.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dpl.core.numerics import at_least_float32
from dpl.core.state import Stateful
from dpl.methods.parts.norm_rules import BatchStatistics, EarlyBatch

if TYPE_CHECKING:
    from dpl.methods.model_state import ModelState

__all__ = ["MixedStream", "OfStream", "likeness", "more_than_chance"]

ROWS = 64  # images of a look
EVERY = 512  # images between two looks while images are mixed, after those at 64, 128, 256 and 512
CHANCE = 1.0  # c
DOUBTS = 2  # looks in a row that must find mixed images before a method learns again


class OfStream(Stateful):
    """What the source model has seen of the stream. It outlasts a return to the source weights."""

    model: "ModelState"  # set by it: the source weights, and the way back to them


class MixedStream(OfStream):
    """Looks at the latest images now and then; where they are not mixed, nothing is to be learnt."""

    seen: int  # images
    due: int  # how many of them there are at the next look
    doubts: int  # looks that must still find mixed images before the method learns
    recent: Tensor | None  # latest images, kept while a look is near and batches are small

    def __init__(self) -> None:
        super().__init__()
        self.declare(seen=0, due=ROWS, doubts=0, recent=None)

    def is_mixed(self, images: Tensor) -> bool:
        """See a batch before the method learns from it; return whether it may. A look reads one value on the host."""
        self.seen += len(images)
        if self.seen <= self.due - ROWS:
            return not self.doubts
        fits = self.recent is not None and self.recent.shape[1:] == images.shape[1:]
        latest = torch.cat([self.recent, images]) if self.recent is not None and fits else images
        self.recent = latest[-ROWS:].clone() if self.seen < self.due else None
        if self.seen >= self.due and len(latest) > 1:
            self._look(latest[:: len(images) // ROWS] if len(images) > ROWS else latest[-ROWS:])
        return not self.doubts

    def _look(self, images: Tensor) -> None:
        """Look at these images. What was learnt before they were first seen not to be mixed is dropped."""
        a, b = likeness(self.model, images)
        before, found = self.doubts, bool(more_than_chance(a, b, len(images), CHANCE))
        if found and not before:
            self.model.restart()
        self.doubts = DOUBTS if found else max(before - 1, 0)
        self.due = self.seen + (ROWS if found or before else min(self.seen, EVERY))


def likeness(model: "ModelState", images: Tensor) -> tuple[Tensor, Tensor]:
    """Return a and b of the source model: batch statistics in all layers, and in the early ones."""
    return _alike(model.source_logits(images, BatchStatistics())), _alike(model.source_logits(images, EarlyBatch()))


def more_than_chance(a: Tensor, b: Tensor, count: int, chance: float) -> Tensor:
    """Return whether b is so much larger than a that `count` images are not mixed."""
    return b - a > 0.3 * a + 0.01 + chance / count


def _alike(logits: Tensor) -> Tensor:
    """Return the mean probability that two images of a batch are of the same class.

    Of one small batch it varies less than the share of equal predictions. The guard counts those (`same_class`), since
    adaptation changes the scale of logits.
    """
    p = at_least_float32(logits).softmax(dim=1).nan_to_num()
    return (p.sum(dim=0).square().sum() - p.square().sum()) / (len(p) * (len(p) - 1))
