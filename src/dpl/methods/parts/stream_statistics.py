"""Statistics of a stream without labels: whether neighbouring images share their class, whether the images change.

Both are sums over batches that decay with time, declared as state.
"""

import torch
from torch import Tensor

from dpl.core.numerics import at_least_float32
from dpl.core.state import Stateful

__all__ = ["ClassOrderStatistics", "ImageShiftDetector"]

_ORDER_MEMORY = 1024  # images over which the class order is averaged
_PRIOR = 16  # images of doubt
_SORTED = 0.05  # correlation above which a stream is not mixed ...
_BY_CHANCE = 5.0  # ... and, divided by the images seen, what chance may add
_DRIFTING = 0.15  # the same later on, when adaptation has moved the logits from batch to batch
_VARIANCE_EPS = 1e-12

_EVERY = 4  # batches that are compared with the past together
_EFFECT = 1.0  # difference of the means, in standard deviations of the images, that is a change ...
_CERTAINTY = 4.0  # ... if it is also this many standard errors
_SHIFT_MEMORY = 64  # batches over which the past is averaged
_PIXEL_EPS = 1e-6


class ClassOrderStatistics(Stateful):
    """Tells mixed streams from streams ordered by class, by the source model's logits.

    The measure is the intra-class correlation of the centred logits within a batch: near 0 if images come together by
    chance, towards 1 if they come class by class. It needs at least two classes in the stream so far.
    """

    total: Tensor | None  # [C] sum of the centred logits
    sums: Tensor | None  # images; squares; mean product of two images of a batch, each batch weighted by its size

    def __init__(self) -> None:
        super().__init__()
        self.declare(total=None, sums=None)

    def restart(self) -> None:
        """Forget the stream."""
        self.total = self.sums = None

    def add(self, logits: Tensor) -> None:
        """Count the logits of one batch [n, C]."""
        z = at_least_float32(logits)
        z = z - z.mean(dim=1, keepdim=True)
        if len(z) < 2:
            return
        rows = torch.full((), float(len(z)), device=z.device)
        squares = z.square().sum()
        sums = torch.stack([rows, squares, (z.sum(dim=0).square().sum() - squares) / (rows - 1)])
        if self.total is None or self.sums is None:
            self.total, self.sums = z.sum(dim=0), sums
        else:
            left = (1 - 1 / _ORDER_MEMORY) ** len(z)
            self.total, self.sums = self.total * left + z.sum(dim=0), self.sums * left + sums

    def is_mixed(self, early: bool) -> bool:
        """Say whether images come together by chance; reads the sums on the host."""
        rows = 1.0 if self.sums is None else max(1.0, float(self.sums[0]))
        return self.intra_batch_correlation() < (_SORTED + _BY_CHANCE / rows if early else _DRIFTING)

    def intra_batch_correlation(self) -> float:
        """Return how much more alike the images of a batch are than any two images; reads the sums on the host."""
        if self.total is None or self.sums is None:
            return 0.0
        rows, squares, products = self.sums.double().tolist()
        common = float((self.total.double() / rows).square().sum())
        variance = max(squares / rows - common, _VARIANCE_EPS)
        return float((products / rows - common) / variance * rows / (rows + _PRIOR))


class ImageShiftDetector(Stateful):
    """Compares the last few batches with those before, by the pixels alone, so that adaptation has no influence.

    Three numbers are computed for each image: mean, contrast (standard deviation) and roughness (difference of
    neighbouring pixels relative to the contrast). Noise, blur, fog, contrast or another camera changes one of them.
    """

    batches: int
    recent: Tensor | None  # [3, 3]: images, sums and sums of squares of each number over the last few batches
    past: Tensor | None  # the same over the batches before

    def __init__(self) -> None:
        super().__init__()
        self.declare(batches=0, recent=None, past=None)

    def detect(self, images: Tensor) -> bool:
        """Count a batch; every few batches, return whether the stream has changed."""
        values = image_statistics(images)
        fresh = torch.stack([torch.ones_like(values).sum(dim=0), values.sum(dim=0), values.square().sum(dim=0)])
        self.recent = fresh if self.recent is None else self.recent + fresh
        self.batches += 1
        if self.batches % _EVERY:
            return False
        changed = self.past is not None and _differ(self.past, self.recent)
        past = None if changed or self.past is None else self.past * (1 - _EVERY / _SHIFT_MEMORY)
        self.past = self.recent if past is None else past + self.recent
        self.recent = None
        return changed


@torch.no_grad()
def image_statistics(images: Tensor) -> Tensor:
    """Return mean, log contrast and log roughness of every image [B, 3]."""
    x = at_least_float32(images)
    flat = x.flatten(1)
    contrast = flat.std(dim=1, correction=0) + _PIXEL_EPS
    roughness = (x[..., 1:] - x[..., :-1]).abs().flatten(1).mean(dim=1) if x.shape[-1] > 1 else contrast
    return torch.stack([flat.mean(dim=1), contrast.log(), ((roughness + _PIXEL_EPS) / contrast).log()], dim=1)


def _differ(past: Tensor, recent: Tensor) -> bool:
    """Say whether the means differ, relative to the standard deviation of the past images."""
    rows, before = past[0], past[1] / past[0]
    deviation = (past[2] / rows - before.square()).clamp(min=_PIXEL_EPS).sqrt()
    effect = (recent[1] / recent[0] - before).abs() / deviation
    certain = effect * (1 / (1 / recent[0] + 1 / rows)).sqrt() > _CERTAINTY
    return bool(((effect > _EFFECT) & certain).any())
