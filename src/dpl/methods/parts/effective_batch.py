"""`norm="auto"`: how many independent images a batch is worth, and how far it has shifted, measured without a label.

Statistics of a batch are as good as the batch is large and mixed. With rho the intra-class correlation, batches being
the classes, n images are worth n_e = n / (1 + (n - 1) rho) (Kish's design effect). rho is measured on the predictions
of the *source* model, so that adaptation has no influence, by a running one-way analysis of variance over the softmax
vectors of some images of each batch:

    F = mean square between batches / mean square within,   excess = F - 1 - 2 sqrt(2 / (batches - 1)), at least 0
    rho = excess / (excess + images looked at in a batch)

A shuffled stream has rho = 0, one sorted by class a rho near 1. The term with the root is two standard errors of F:
chance alone must not count.

That needs several batches, and a stream of one class has no other batch to differ from. So some batches are looked at
by themselves, too. Where all layers use the statistics of a batch of one class, its images look different; where only
the early ones do, they look alike: a and b of dpl.methods.parts.mixed_stream. If b is larger than
a by more than chance, rho is at least (b - a) / (1 - a).

The same pass of the source model measures the shift: how far, in its BatchNorm layers, the means of the images lie
from the running ones (`MeasuredShift`), on average over layers and over the last 16 images or more.

`AutoBlend` makes of both the share of batch statistics. The learning rate is multiplied by min(1, n_e / 32), because a
small batch has a noisy gradient and takes more steps for the same images, and by the same factor of the shift as the
share: where nothing has shifted there is nothing to learn. When rho first becomes positive, everything learnt before is
dropped: it was learnt from batches that looked mixed.
"""

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from dpl.core.numerics import at_least_float32
from dpl.methods.parts.mixed_stream import OfStream, likeness, more_than_chance
from dpl.methods.parts.norm_rules import ENOUGH, FULL_BATCH, STREAM, UNKNOWN, AutoBlend, MeasuredShift

__all__ = ["EffectiveBatch"]

_MEMORY = 64  # batches over which the sums are averaged, so that a stream may change its order
_STANDARD_ERRORS = 2
_EPS = 1e-6
_ROWS = 256  # images of a batch that are looked at by themselves
_OF_ONE_CLASS = 0.06  # shift that clean images of one class have, in running variances
_EVERY = 16  # batches between two looks at one by itself, after the first ones


class EffectiveBatch(OfStream):
    """Sees each batch before the method does; sets the rule's rho and the learning rate."""

    rho: Tensor  # [], 0 to 1
    shift: Tensor  # [], in running variances
    moves: Tensor | None  # [channels], of the means over the stream, in running deviations
    seen: float  # how much of their average is the stream's
    total: Tensor | None  # [C], sum of the predictions
    squares: Tensor | None  # [2]: of each prediction; of each batch's total, divided by its images
    batches: float  # sum of the batches' weights, and of their squares
    squared_weights: float
    rows: float
    correlated: int  # whether rho was positive once
    seen_alone: int  # batches large enough to be looked at by themselves
    alone: Tensor  # [], least rho by the latest of these that was

    def __init__(self, rule: AutoBlend, device: torch.device) -> None:
        super().__init__()
        self.rule = rule
        self.declare(rho=torch.zeros((), device=device), total=None, squares=None)
        self.declare(shift=torch.full((), UNKNOWN, device=device), moves=None, seen=0.0)
        self.declare(batches=0.0, squared_weights=0.0, rows=0.0, correlated=0)
        self.declare(seen_alone=0, alone=torch.zeros((), device=device))
        self.follow()

    def look(self, images: Tensor) -> None:
        """Measure rho and the shift with this batch, before the method predicts it."""
        if len(images) > 1:
            measured = MeasuredShift()
            self._add(self._source_predictions(images[:: -(-len(images) // ENOUGH)], measured))
            self._average(measured, len(images))
            self._look_alone(images)
            self.follow()
            # The one value that is read on the host, until it is first positive: a return to the source changes the
            # shapes of memories, which no tensor can decide.
            if not self.correlated and bool(self.rho > 0):
                self.correlated = 1
                self.model.restart()
        full = (self.rule.effective_size(len(images)) / FULL_BATCH).clamp(max=1)
        for optimizer in self.model.method.optimizers.values():
            optimizer.scale_lr(full * self.rule.shifted)

    def _source_predictions(self, images: Tensor, measured: MeasuredShift) -> Tensor:
        """Return the source model's predictions, and measure the shift on the way."""
        logits = self.model.source_logits(images, measured)
        self.shift = measured.added_to(self.shift, len(images))
        return at_least_float32(logits).softmax(dim=1).nan_to_num()  # one broken image must not stay in the sums

    def _look_alone(self, images: Tensor) -> None:
        """Now and then see whether the batch is mixed, by itself: after 1, 2, 4, 8, 16 batches, then every 16."""
        if len(images) < ENOUGH or not self.model.network.norm.layers:
            return
        self.seen_alone += 1
        n = self.seen_alone
        if n % _EVERY == 0 or (n < _EVERY and n & (n - 1) == 0):
            some = images[:: -(-len(images) // _ROWS)]
            a, b = likeness(self.model, some)
            found = more_than_chance(a, b, len(some), chance=0.5)
            self.alone = torch.where(found, (b - a) / (1 - a), 0).to(self.rho.dtype)
        self.rho = torch.maximum(self.rho, self.alone)

    @torch.no_grad()
    def _average(self, measured: MeasuredShift, count: int) -> None:
        """Average the moves of the means over the stream; once it is known to be correlated, they tell the shift."""
        if not measured.moves:
            return
        now, rate = torch.cat(measured.moves).nan_to_num(), count / (count + STREAM)
        self.moves = now * rate if self.moves is None else torch.lerp(self.moves, now, rate)
        self.seen += rate * (1 - self.seen)
        if self.correlated:
            by_layer = torch.split((self.moves / self.seen).square(), [len(move) for move in measured.moves])
            over_stream = torch.stack([layer.mean() for layer in by_layer]).mean().to(self.shift.dtype)
            self.shift = torch.where(self.rho > 0, over_stream, self.shift)

    def _add(self, predictions: Tensor) -> None:
        """Add one batch of predictions [m, C] to the sums, and compute rho."""
        rows, total = len(predictions), predictions.sum(dim=0)
        squares = torch.stack([predictions.square().sum(), total.square().sum() / rows])
        left = 1 - 1 / _MEMORY
        self.total = total if self.total is None else self.total * left + total
        self.squares = squares if self.squares is None else self.squares * left + squares
        self.batches = self.batches * left + 1
        self.squared_weights = self.squared_weights * left**2 + 1
        self.rows = self.rows * left + rows
        self.rho = self._correlation(self.squares[0], self.squares[1], self.total.square().sum() / self.rows)

    def _correlation(self, squares: Tensor, of_batches: Tensor, of_all: Tensor) -> Tensor:
        """Return rho from the sums of squares; see the formula above."""
        freedom = max(self.batches - self.squared_weights / self.batches, _EPS)  # batches - 1 if all weigh the same
        between = (of_batches - of_all) / freedom
        within = (squares - of_batches) / (self.rows - self.batches)
        by_chance = 1 + _STANDARD_ERRORS * math.sqrt(2 / freedom)
        excess = (between / within.clamp(min=_EPS) - by_chance).clamp(min=0)
        return excess / (excess + self.rows / self.batches)

    def follow(self) -> None:
        """Tell the rule."""
        self.rule.rho, self.rule.shift = self.rho, self.shift
        self.rule.of_classes = torch.zeros_like(self.shift)
        if self.total is not None:
            repeats = (self.total / self.rows).square().sum()  # 1 / effective number of classes
            self.rule.of_classes = torch.where(self.rho > 0, _OF_ONE_CLASS * repeats, 0).to(self.shift)

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Set everything to a copy of `state`, the rule included."""
        super().restore(state)
        self.follow()

    def move(self, transfer: Callable[[Tensor], Tensor]) -> None:
        """Follow the network, the rule included."""
        super().move(transfer)
        self.follow()
