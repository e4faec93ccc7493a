"""Do the images look different from those of a while ago? Told from the pixels alone, so that learning cannot blur it.

Three numbers for each image: its mean, its contrast (standard deviation) and its roughness (how much neighbouring
pixels differ, against the contrast). Noise, blur, fog, contrast and another camera each move at least one of them.
"""

import torch
from torch import Tensor

from dpl.core.numerics import at_least_float32
from dpl.core.state import Stateful

__all__ = ["StreamSignals"]

_EVERY = 4  # batches that are compared with the past together
_EFFECT = 1.0  # difference of the means, in standard deviations of the images, that is a change ...
_CERTAINTY = 4.0  # ... if it is also this many standard errors
_MEMORY = 64  # batches over which the past is remembered
_EPS = 1e-6


class StreamSignals(Stateful):
    """Compares the last few batches with those before."""

    batches: int
    recent: Tensor | None  # [3, 3]: rows, sums and sums of squares of each signal over the last few batches
    past: Tensor | None  # the same over the batches before

    def __init__(self) -> None:
        super().__init__()
        self.declare(batches=0, recent=None, past=None)

    def changed(self, images: Tensor) -> bool:
        """Take a batch into account; every few batches, say whether the stream has changed."""
        signals = image_signals(images)
        fresh = torch.stack([torch.ones_like(signals).sum(dim=0), signals.sum(dim=0), signals.square().sum(dim=0)])
        self.recent = fresh if self.recent is None else self.recent + fresh
        self.batches += 1
        if self.batches % _EVERY:
            return False
        different = self.past is not None and _differ(self.past, self.recent)
        keep = None if different or self.past is None else self.past * (1 - _EVERY / _MEMORY)
        self.past = self.recent if keep is None else keep + self.recent
        self.recent = None
        return different


@torch.no_grad()
def image_signals(images: Tensor) -> Tensor:
    """Return mean, log contrast and log roughness of every image [B, 3]."""
    x = at_least_float32(images)
    flat = x.flatten(1)
    contrast = flat.std(dim=1, correction=0) + _EPS
    roughness = (x[..., 1:] - x[..., :-1]).abs().flatten(1).mean(dim=1) if x.shape[-1] > 1 else contrast
    return torch.stack([flat.mean(dim=1), contrast.log(), ((roughness + _EPS) / contrast).log()], dim=1)


def _differ(past: Tensor, recent: Tensor) -> bool:
    """Say whether the means differ, measured by the spread of the images of the past."""
    rows, before = past[0], past[1] / past[0]
    deviation = (past[2] / rows - before.square()).clamp(min=_EPS).sqrt()
    effect = (recent[1] / recent[0] - before).abs() / deviation
    certain = effect * (1 / (1 / recent[0] + 1 / rows)).sqrt() > _CERTAINTY
    return bool(((effect > _EFFECT) & certain).any())
