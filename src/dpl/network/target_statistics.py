"""The statistics of recent batches at every BatchNorm layer: what an exported network normalises with.

A plain network normalises by fixed statistics. Where adaptation uses those of each batch, their average over the
recent batches takes their place. It costs almost nothing: the fused kernel that normalises a batch also updates
running buffers, and it is given these instead of the layer's own.
"""

import torch
from torch import Tensor

from dpl.core.state import Stateful
from dpl.network.norm_control import NormControl, Statistics

__all__ = ["RECENT", "TargetStatistics"]

RECENT = 16  # batches that the average reaches back to; more would keep statistics that older weights made


class TargetStatistics(Stateful):
    """Average mean and variance of each channel: of all batches so far, or of about the last `RECENT`."""

    batches: int
    images: int  # in the last batch
    mean: Tensor | None  # the channels of all layers, one after the other
    variance: Tensor | None

    def __init__(self) -> None:
        super().__init__()
        self.declare(batches=0, images=0, mean=None, variance=None)
        self.change_in_place("mean", "variance")

    def begin(self, control: NormControl, count: int) -> None:
        """Let the next pass of each layer count, if it computes statistics of the batch of `count` images."""
        control.targets, self.images = self.by_layer(control), count
        self._waiting = len(control.targets)
        control.target_momentum = 1 / min(self.batches + 1, RECENT)

    def end(self, control: NormControl) -> None:
        """Let no further pass count."""
        self.batches += len(control.targets) < self._waiting
        control.targets = {}

    def by_layer(self, control: NormControl) -> Statistics:
        """Return the average of each layer that has running statistics, as views that may be written to."""
        layers = {layer: layer.running_mean for layer in control.layers if layer.running_mean is not None}
        widths = [len(mean) for mean in layers.values()]
        if self.mean is None or self.variance is None:
            like = next(iter(layers.values()), torch.empty(0))
            self.mean, self.variance = like.new_zeros(sum(widths)), like.new_zeros(sum(widths))
        pairs = zip(torch.split(self.mean, widths), torch.split(self.variance, widths), strict=True)
        return dict(zip(layers, pairs, strict=True))
