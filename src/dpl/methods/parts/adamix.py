"""AdaMixBN: each layer mixes the source's statistics with the batch's by how far the batch lies from the source."""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from dpl.core.numerics import variance_and_mean
from dpl.network.norm_control import BatchRule, Forward, NormControl, channel_statistics, normalise

__all__ = ["AdaMix", "Moments", "source_share"]

_TINY = 1e-30  # all distances are zero: batch and source agree, and any share will do


class Moments(NamedTuple):
    """Mean and variance of each channel, [..., C]."""

    mean: Tensor
    variance: Tensor


@dataclass
class AdaMix(BatchRule):
    """Normalise one batch, over all passes that are made on it, as DomainAdaptor's AdaMixBN does.

    The first pass finds for each layer the affine parameters with which normalising by the batch equals normalising by
    the mixed statistics. Their difference from the layer's own is kept as an offset, a constant for this batch: updates
    of the layer's parameters act on the rectified ones, and the parameters themselves hold nothing of the batch.
    A new batch needs a new rule.
    """

    offsets: dict[_BatchNorm, tuple[Tensor, Tensor]] = field(default_factory=dict)
    needs_running = True

    def normalise(self, layer: Any, forward: Forward, x: Tensor, control: NormControl) -> Tensor:
        """Normalise by the batch, with rectified affine parameters."""
        source = Moments(layer.running_mean, layer.running_var)
        mean, variance = channel_statistics(x, correction=1)
        batch = Moments(mean.to(source.mean.dtype), variance.to(source.variance.dtype))
        weight, bias = _affine(layer, batch.mean)
        if layer not in self.offsets:
            self.offsets[layer] = _offset(weight, source, batch, source_share(x, source, batch), layer.eps)
        added_weight, added_bias = self.offsets[layer]
        return normalise(layer, forward, x, *batch, (weight + added_weight, bias + added_bias))

    @torch.no_grad()
    def fold(self) -> None:
        """Add the offsets to the layers' parameters for good."""
        for layer, (added_weight, added_bias) in self.offsets.items():
            if layer.weight is not None:
                layer.weight.add_(added_weight)
            if layer.bias is not None:
                layer.bias.add_(added_bias)


@torch.no_grad()
def source_share(x: Tensor, source: Moments, batch: Moments) -> Tensor:
    """Return lambda, the source's share: the mean over samples i of 1 - D(t, s) / (D(t, s) + D(i, s) + D(i, t)).

    D is the mean squared difference of the channels' means plus that of their deviations; t is the batch, s the source.
    """
    maps = x.flatten(2) if x.ndim > 2 else x[:, :, None]
    # One value has no variance: zero, where the unbiased formula gives none.
    variance, mean = variance_and_mean(maps, [2], correction=min(1, maps.shape[2] - 1))
    own, between = Moments(mean.squeeze(2), variance.squeeze(2)), _distance(batch, source)
    around = between + _distance(own, source) + _distance(own, batch)
    return (1 - between / around.clamp(min=_TINY)).clamp(0, 1).mean()


def _distance(a: Moments, b: Moments) -> Tensor:
    means, deviations = a.mean - b.mean, a.variance.sqrt() - b.variance.sqrt()
    return means.square().mean(dim=-1) + deviations.square().mean(dim=-1)


@torch.no_grad()
def _offset(weight: Tensor, source: Moments, batch: Moments, share: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return what turns a layer's affine parameters into the rectified ones."""
    deviation = (batch.variance + eps).sqrt()
    rectified = weight * deviation / (torch.lerp(batch.variance, source.variance, share) + eps).sqrt()
    return rectified - weight, share * (batch.mean - source.mean) / deviation * rectified


def _affine(layer: _BatchNorm, like: Tensor) -> tuple[Tensor, Tensor]:
    weight = torch.ones_like(like) if layer.weight is None else layer.weight
    return weight, torch.zeros_like(like) if layer.bias is None else layer.bias
