"""Check each image of a batch before it enters the network; invalid images are excluded one by one.

An image is judged by its peak, its largest absolute value: one pass over the pixels finds NaN, infinity and values out
of range alike. The usual peak is at least 1 and is measured on accepted images. So images in [0, 1], normalised ones
and those in [0, 255] all work without a setting.

Two more kinds of image are valid but useless: a constant frame (a covered lens) and further copies of a frame (a camera
that hangs). They would spoil batch statistics and teach nothing, so they are answered by the source model.
"""

import math
from collections.abc import Container, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from dpl.core.state import Stateful
from dpl.guard.settings import GuardSettings

__all__ = [
    "CONSTANT", "COPY", "NoFiniteAnswer", "RowCheck", "RowCheckResult", "nonfinite_as_zeros", "refused_as_zeros",
    "split_useless", "without_refused",
]  # fmt: skip

_ABSURD = 1e6  # no image has such values, whatever the first batch looked like


_FLAT = 1e-3  # of the usual peak: the range of values in a constant frame
_EQUAL = 1e-6  # relative difference of the fingerprints of equal images
CONSTANT, COPY = "a constant frame", "a copy of another image of the batch"


class RowCheckResult(NamedTuple):
    """Rows that must not enter and useless rows, with the reason for each, and the usual peak once the rest entered."""

    refused: dict[int, str]
    useless: dict[int, str]
    usual_peak: float


class RowCheck(Stateful):
    """Accepts or refuses rows of a batch; remembers the usual peak of accepted ones."""

    on_host = True

    usual_peak: Tensor | None  # the largest median peak of any accepted batch

    def __init__(self, settings: GuardSettings) -> None:
        super().__init__()
        self.settings = settings
        self.declare(usual_peak=None)

    def examine(self, images: Tensor) -> RowCheckResult:
        """Judge every row; change nothing. The host reads once: four numbers for each row."""
        smallest, largest, varied, fresh = self._facts(images.detach().flatten(1)).cpu()
        useless = {}
        if not bool((varied * fresh).all()):
            rows = enumerate(zip(varied.tolist(), fresh.tolist(), strict=True))
            useless = {row: COPY if varies else CONSTANT for row, (varies, new) in rows if not (varies and new)}
        if self.usual_peak is not None and self._within(float(smallest.amin()), float(largest.amax())):
            return RowCheckResult({}, useless, float(self.usual_peak))
        peak = torch.maximum(-smallest, largest)  # NaN stays NaN, and no comparison accepts it
        usual = _median(peak[peak <= _ABSURD]) if self.usual_peak is None else float(self.usual_peak)
        limit = min(self.settings.max_peak_factor * usual, _ABSURD)
        accepted = peak <= limit
        if self.settings.low is not None:
            accepted &= smallest >= self.settings.low
        if self.settings.high is not None:
            accepted &= largest <= self.settings.high
        bad = (~accepted).nonzero()[:, 0].tolist()
        bounds = torch.stack([smallest, largest], dim=1)[bad].tolist()
        reasons = {row: _reason(low, high, limit) for row, (low, high) in zip(bad, bounds, strict=True)}
        useless = {row: why for row, why in useless.items() if row not in reasons}
        return RowCheckResult(reasons, useless, max(usual, _median(peak[accepted])))

    def _facts(self, flat: Tensor) -> Tensor:
        """Return for each row [4, n]: its smallest and largest value, whether it varies, whether it is no copy."""
        smallest, largest = torch.aminmax(flat, dim=1)
        constant = largest - smallest <= _FLAT * (1.0 if self.usual_peak is None else float(self.usual_peak))
        copy = _copies(flat) & ~constant
        return torch.stack([smallest, largest, (~constant).to(flat.dtype), (~copy).to(flat.dtype)])

    def _within(self, smallest: float, largest: float) -> bool:
        """Say whether no value of a batch exceeds the usual peak; then the rows need no check one by one."""
        low, high = self.settings.low, self.settings.high
        inside = (low is None or smallest >= low) and (high is None or largest <= high)
        return self.usual_peak is not None and max(-smallest, largest) <= float(self.usual_peak) and inside

    def update_peak(self, result: RowCheckResult) -> None:
        """Remember the usual peak, once the accepted rows have entered."""
        if self.usual_peak is None or result.usual_peak > float(self.usual_peak):
            self.usual_peak = torch.tensor(result.usual_peak, dtype=torch.float64)


def _copies(flat: Tensor) -> Tensor:
    """Return which rows [n] of [n, d] equal an earlier row, by a fixed projection of each to one number."""
    direction = torch.arange(flat.shape[1], device=flat.device, dtype=torch.float32).mul(12.9898).cos()
    order = (flat.float() @ direction).sort(stable=True)
    gap = order.values.diff()
    equal = gap <= _EQUAL * order.values[1:].abs().clamp(min=1.0)
    return torch.zeros(len(flat), dtype=torch.bool, device=flat.device).index_copy(0, order.indices[1:], equal)


class NoFiniteAnswer(Exception):  # noqa: N818 - a message between two methods of the guard, never seen outside
    """Rows for which even the source model returns values that are not finite."""

    def __init__(self, rows: list[int]) -> None:
        super().__init__(rows)
        self.rows = rows


def without_refused(images: Tensor, refused: Mapping[int, str]) -> Tensor:
    """Return the images without the refused rows."""
    return images[_rows(images, refused)] if refused else images


def split_useless(images: Tensor, examined: RowCheckResult) -> tuple[Tensor, Tensor]:
    """Return the images that were not refused, and the places of the useful ones among them."""
    kept = [row for row in range(len(images)) if row not in examined.refused]
    useless = {place for place, row in enumerate(kept) if row in examined.useless}
    accepted = without_refused(images, examined.refused)
    return accepted, _rows(accepted, useless)


def refused_as_zeros(logits: Tensor, refused: Mapping[int, str], count: int) -> Tensor:
    """Return logits for all rows of a batch, with zeros for those that were refused."""
    if not refused:
        return logits
    whole = logits.new_zeros(count, logits.shape[1])
    return whole.index_copy(0, _rows(whole, refused), logits)


def _rows(batch: Tensor, without: Container[int]) -> Tensor:
    """Return the places of a batch that are not in `without`, on its device; a mask would be read on the host."""
    return torch.tensor([row for row in range(len(batch)) if row not in without], dtype=torch.int64).to(batch.device)


def nonfinite_as_zeros(logits: Tensor) -> Tensor:
    """Replace rows that are not finite by zeros."""
    return torch.where(logits.isfinite().all(dim=1, keepdim=True), logits, torch.zeros_like(logits))


def _median(peaks: Tensor) -> float:
    """Return the median peak, at least 1; a minority of bad rows cannot move it."""
    return max(1.0, float(peaks.median())) if len(peaks) else 1.0


def _reason(smallest: float, largest: float, limit: float) -> str:
    if not (math.isfinite(smallest) and math.isfinite(largest)):
        return "a value is not finite"
    return f"values from {smallest:.4g} to {largest:.4g} are out of range (the limit is {limit:.4g})"
