"""How far images have shifted from those of the source, by the statistics of its BatchNorm layers."""

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from dpl.core.numerics import at_least_float32
from dpl.network.norm import UNKNOWN, Forward, NormControl, RunningStatistics

__all__ = ["ENOUGH", "MeasuredShift"]

ENOUGH = 16  # images of a batch that tell how far it has shifted, and how alike its images are


@dataclass(frozen=True)
class MeasuredShift:
    """Source statistics; beside, how far the images lie from them.

    In each layer it is the squared distance of the images' mean from the running mean, minus what chance gives to so
    few images, in units of the running variance; on average over channels.
    """

    by_layer: list[Tensor] = field(default_factory=list)

    def __call__(self, layer: _BatchNorm, forward: Forward, x: Tensor, control: NormControl) -> Tensor:
        """Normalise by the source statistics, and measure."""
        one = len(x) == 1  # it has no spread
        if layer.running_mean is not None and layer.running_var is not None and not one:
            means = at_least_float32(x).flatten(2).mean(dim=2) if x.ndim > 2 else at_least_float32(x)
            by_chance = means.var(dim=0) / len(means)
            excess = (means.mean(dim=0) - layer.running_mean).square() - by_chance
            self.by_layer.append((excess / (layer.running_var + layer.eps)).mean())
        return RunningStatistics()(layer, forward, x, control)

    def added_to(self, before: Tensor, images: int) -> Tensor:
        """Return the average over layers, and over the images before if these are fewer than `ENOUGH`."""
        if not self.by_layer:
            return before
        now = torch.stack(self.by_layer).mean().nan_to_num().to(before.dtype)  # a broken image must not stay
        return torch.where(before > UNKNOWN / 2, now, before).lerp(now, min(1.0, images / ENOUGH))
