"""Is a stream mixed, or do neighbouring images share their class? Told from the source statistics' logits.

The likeness of the rows of one batch is the intra-class correlation of the centred logits: near 0 where rows come
together by chance, towards 1 where they come class by class. It needs at least two classes to have gone by.
"""

import torch
from torch import Tensor

from dpl.core.numerics import at_least_float32
from dpl.core.state import Stateful

__all__ = ["StreamOrder"]

_MEMORY = 1024  # rows over which the stream is remembered
_PRIOR = 16  # rows of doubt
_SORTED = 0.05  # likeness above which a stream is not mixed ...
_BY_CHANCE = 5.0  # ... and, divided by the rows seen, what chance may add
_DRIFTING = 0.15  # the same later on, when learning has moved the logits from batch to batch
_EPS = 1e-12


class StreamOrder(Stateful):
    """Sums from which the likeness of rows that come together is computed."""

    centre: Tensor | None  # [C] sum of the centred logits
    sums: Tensor | None  # rows; squares; mean product of two rows of a batch, each batch counted by its rows

    def __init__(self) -> None:
        super().__init__()
        self.declare(centre=None, sums=None)

    def forget(self) -> None:
        """Begin anew."""
        self.centre = self.sums = None

    def add(self, logits: Tensor) -> None:
        """Take rows of one batch [n, C] into account."""
        z = at_least_float32(logits)
        z = z - z.mean(dim=1, keepdim=True)
        if len(z) < 2:
            return
        rows = torch.full((), float(len(z)), device=z.device)
        squares = z.square().sum()
        sums = torch.stack([rows, squares, (z.sum(dim=0).square().sum() - squares) / (rows - 1)])
        if self.centre is None or self.sums is None:
            self.centre, self.sums = z.sum(dim=0), sums
        else:
            rest = (1 - 1 / _MEMORY) ** len(z)
            self.centre, self.sums = self.centre * rest + z.sum(dim=0), self.sums * rest + sums

    def mixed(self, young: bool) -> bool:
        """Say whether rows come together by chance; reads the sums on the host."""
        rows = 1.0 if self.sums is None else max(1.0, float(self.sums[0]))
        return self.likeness() < (_SORTED + _BY_CHANCE / rows if young else _DRIFTING)

    def likeness(self) -> float:
        """Return how much more alike the rows of a batch are than any two rows; reads the sums on the host."""
        if self.centre is None or self.sums is None:
            return 0.0
        rows, squares, products = self.sums.double().tolist()
        common = float((self.centre.double() / rows).square().sum())
        variance = max(squares / rows - common, _EPS)
        return float((products / rows - common) / variance * rows / (rows + _PRIOR))
