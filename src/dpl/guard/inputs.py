"""Which rows of a batch can be trusted to enter the network; the others are set aside, one by one.

A row is judged by its peak, the largest absolute value in it: one pass over the pixels finds NaN, infinity and values
out of range alike. The usual peak is at least 1 and is learnt from the rows that were accepted, so that images in
[0, 1], normalised ones and those in [0, 255] all work without being told.
"""

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from dpl.core.state import Stateful
from dpl.guard.settings import GuardSettings

__all__ = ["Examined", "RowCheck", "Unanswerable", "rows_or_zeros", "spread", "without"]

_ABSURD = 1e6  # no image has such values, whatever the first batch looked like


class Examined(NamedTuple):
    """The rows that must not enter, with the reason for each, and the usual peak once the others have entered."""

    refused: dict[int, str]
    usual: float


class RowCheck(Stateful):
    """Accepts or refuses rows; remembers the usual peak of accepted ones."""

    usual: Tensor | None  # the largest median peak of any accepted batch

    def __init__(self, settings: GuardSettings) -> None:
        super().__init__()
        self.settings = settings
        self.declare(usual=None)

    def examine(self, images: Tensor) -> Examined:
        """Judge every row; change nothing."""
        if self.usual is not None and self._within(*torch.stack(torch.aminmax(images.detach())).tolist()):
            return Examined({}, float(self.usual))
        smallest, largest = torch.aminmax(images.detach().flatten(1), dim=1)
        peak = torch.maximum(-smallest, largest)  # NaN stays NaN, and no comparison accepts it
        usual = _median(peak[peak <= _ABSURD]) if self.usual is None else float(self.usual)
        limit = min(self.settings.max_peak_factor * usual, _ABSURD)
        accepted = peak <= limit
        if self.settings.low is not None:
            accepted &= smallest >= self.settings.low
        if self.settings.high is not None:
            accepted &= largest <= self.settings.high
        bad = (~accepted).nonzero()[:, 0].tolist()
        bounds = torch.stack([smallest, largest], dim=1)[bad].tolist()
        reasons = {row: _reason(low, high, limit) for row, (low, high) in zip(bad, bounds, strict=True)}
        return Examined(reasons, max(usual, _median(peak[accepted])))

    def _within(self, smallest: float, largest: float) -> bool:
        """Say whether nothing in a batch exceeds the usual peak, so that no row need be looked at by itself."""
        low, high = self.settings.low, self.settings.high
        inside = (low is None or smallest >= low) and (high is None or largest <= high)
        return self.usual is not None and max(-smallest, largest) <= float(self.usual) and inside

    def learn(self, examined: Examined) -> None:
        """Remember the usual peak, once the accepted rows have entered."""
        if self.usual is None or examined.usual > float(self.usual):
            self.usual = torch.tensor(examined.usual, dtype=torch.float64)

    def move(self, transfer: object) -> None:
        """Stay on the host."""


class Unanswerable(Exception):  # noqa: N818 - a message between two methods of the guard, never seen outside
    """Rows for which even the source network has no finite answer."""

    def __init__(self, rows: list[int]) -> None:
        super().__init__(rows)
        self.rows = rows


def without(images: Tensor, refused: Mapping[int, str]) -> Tensor:
    """Return the images but for the refused rows."""
    if not refused:
        return images
    good = torch.ones(len(images), dtype=torch.bool, device=images.device)
    good[list(refused)] = False
    return images[good]


def spread(logits: Tensor, refused: Mapping[int, str], count: int) -> Tensor:
    """Return logits for all rows: zeros for those that were refused."""
    if not refused:
        return logits
    answer = logits.new_zeros(count, logits.shape[1])
    good = [row for row in range(count) if row not in refused]
    answer[good] = logits
    return answer


def rows_or_zeros(logits: Tensor) -> Tensor:
    """Replace rows that are not finite by zeros."""
    return torch.where(logits.isfinite().all(dim=1, keepdim=True), logits, torch.zeros_like(logits))


def _median(peaks: Tensor) -> float:
    """Return the usual one of some peaks; a minority of bad rows cannot move it."""
    return max(1.0, float(peaks.median())) if len(peaks) else 1.0


def _reason(smallest: float, largest: float, limit: float) -> str:
    if not (math.isfinite(smallest) and math.isfinite(largest)):
        return "a value is not finite"
    return f"values from {smallest:.4g} to {largest:.4g} are out of range (the limit is {limit:.4g})"
