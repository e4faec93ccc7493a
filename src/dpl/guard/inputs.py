"""Check each image of a batch before it enters the network; invalid images are excluded one by one.

An image is judged by its peak, its largest absolute value: one pass over the pixels finds NaN, infinity and values out
of range alike. The usual peak is at least 1 and is measured on accepted images. So images in [0, 1], normalised ones
and those in [0, 255] all work without a setting.

Two more kinds of image are valid but useless: a constant frame (a covered lens) and further copies of a frame (a camera
that hangs). They would spoil batch statistics and teach nothing, so they are answered by the source model.
"""

import math
from collections.abc import Collection
from typing import NamedTuple

import torch
from torch import Tensor

from dpl.core.state import Stateful
from dpl.guard.settings import GuardSettings

__all__ = ["CONSTANT", "COPY", "RowCheck", "RowCheckResult", "spread", "without"]

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
        flat = images.detach().flatten(1)
        smallest, largest = torch.aminmax(flat, dim=1)
        varies = largest - smallest > _FLAT * (1.0 if self.usual_peak is None else float(self.usual_peak))
        useful = varies & ~_copies(flat)
        facts = torch.stack([smallest, largest, varies.to(flat.dtype), useful.to(flat.dtype)])
        smallest, largest, varies, useful = facts.cpu()
        peak = torch.maximum(-smallest, largest)  # NaN stays NaN, and no comparison accepts it
        usual = _median(peak[peak <= _ABSURD]) if self.usual_peak is None else float(self.usual_peak)
        limit = min(self.settings.max_peak_factor * usual, _ABSURD)
        low, high = self.settings.low, self.settings.high
        accepted = (peak <= limit) & (low is None or smallest >= low) & (high is None or largest <= high)
        bad = (~accepted).nonzero().flatten().tolist()
        useless = (accepted & (useful == 0)).nonzero().flatten().tolist()
        refused = {row: _reason(float(smallest[row]), float(largest[row]), limit) for row in bad}
        reasons = {row: COPY if bool(varies[row]) else CONSTANT for row in useless}
        return RowCheckResult(refused, reasons, max(usual, _median(peak[accepted])))

    def update_peak(self, result: RowCheckResult) -> None:
        """Remember the usual peak, once the accepted rows have entered."""
        self.usual_peak = torch.tensor(result.usual_peak, dtype=torch.float64)


def without(images: Tensor, rows: Collection[int]) -> Tensor:
    """Return the images without some rows."""
    return images[_others(images, rows)] if rows else images


def spread(logits: Tensor, rows: Collection[int], count: int, whole: Tensor | None = None) -> Tensor:
    """Return logits for a whole batch: these in all places but `rows`, which keep what `whole` has (None: zeros)."""
    if not rows:
        return logits
    whole = logits.new_zeros(count, logits.shape[1]) if whole is None else whole
    return whole.index_copy(0, _others(whole, rows), logits.to(whole))


def _others(batch: Tensor, rows: Collection[int]) -> Tensor:
    """Return the places of a batch that are not in `rows`, on its device; a mask would be read on the host."""
    return torch.tensor([row for row in range(len(batch)) if row not in rows], dtype=torch.int64).to(batch.device)


def _copies(flat: Tensor) -> Tensor:
    """Return which rows [n] of [n, d] equal an earlier row, by a fixed projection of each to one number."""
    direction = torch.arange(flat.shape[1], device=flat.device, dtype=torch.float32).mul(12.9898).cos()
    order = (flat.float() @ direction).sort(stable=True)
    gap = order.values.diff()
    equal = gap <= _EQUAL * order.values[1:].abs().clamp(min=1.0)
    return torch.zeros(len(flat), dtype=torch.bool, device=flat.device).index_copy(0, order.indices[1:], equal)


def _median(peaks: Tensor) -> float:
    """Return the median peak, at least 1; a minority of bad rows cannot move it."""
    return max(1.0, float(peaks.median())) if len(peaks) else 1.0


def _reason(smallest: float, largest: float, limit: float) -> str:
    if not (math.isfinite(smallest) and math.isfinite(largest)):
        return "a value is not finite"
    return f"values from {smallest:.4g} to {largest:.4g} are out of range (the limit is {limit:.4g})"
