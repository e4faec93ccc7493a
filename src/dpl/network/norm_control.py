"""How the BatchNorm layers of a network are told which statistics to use; their parameters are not touched.

Every BatchNorm layer of the private copy gets a forward of its own that follows one shared `NormControl`. Rules hide
attributes of a layer for the length of one call, so `state_dict` keys, buffers and activations fused into the layer
(timm's BatchNormAct2d) stay as they are.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from dpl.core.numerics import variance_and_mean
from dpl.core.state import Stateful

__all__ = [
    "RECENT", "BatchRule", "BatchStatistics", "Forward", "NormControl", "Rule", "RunningStatistics", "Statistics",
    "TargetStatistics", "channel_statistics", "hiding", "install", "normalise", "normalise_each", "uninstall",
]  # fmt: skip

RECENT = 16  # batches that an average of statistics reaches back to; more would keep those that older weights made

Forward = Callable[[Tensor], Tensor]  # a layer's original forward
Pair = tuple[Tensor, Tensor]  # mean and variance of each channel, or scale and shift
Statistics = dict[_BatchNorm, Pair]  # mean and variance that a layer used
Rule = Callable[[_BatchNorm, Forward, Tensor, "NormControl"], Tensor]  # how one layer normalises one input


class RunningStatistics:
    """The source model's running statistics, never updated."""

    def __call__(self, layer: _BatchNorm, forward: Forward, x: Tensor, control: "NormControl") -> Tensor:
        """Normalise as in evaluation mode."""
        with hiding(layer, training=False):
            return forward(x)


@dataclass
class NormControl:
    """The rule that all layers of one network follow."""

    rule: Rule = field(default_factory=RunningStatistics)
    groups: int = 1  # a batch of this many equal parts, each normalised by itself (augmented views run together)
    recorded: Statistics | None = None
    layers: list[_BatchNorm] = field(default_factory=list)  # that follow it
    adapting: bool = False  # rules that remember the stream follow it now
    targets: Statistics = field(default_factory=dict)  # averages that the next pass of a layer enters (for exports)
    target_momentum: float = 0.0  # its weight in them

    @cached_property
    def columns(self) -> dict[Any, slice]:
        """Where the channels of each layer with running statistics lie in a tensor of all of them, side by side."""
        layers = [layer for layer in self.layers if layer.running_mean is not None]
        ends = accumulate(layer.num_features for layer in layers)
        return {layer: slice(end - layer.num_features, end) for layer, end in zip(layers, ends, strict=True)}

    def using(self, rule: Rule | None = None, *, groups: int = 1) -> AbstractContextManager[None]:
        """Follow another rule (or the same one on each part of the batch) inside the block."""
        return hiding(self, rule=rule or self.rule, groups=groups)

    @contextmanager
    def recording(self) -> Iterator[Statistics]:
        """Record the statistics that each layer computes inside the block; running ones are not recorded."""
        statistics: Statistics = {}
        with hiding(self, recorded=statistics):
            yield statistics

    def record(self, layer: _BatchNorm, mean: Tensor, variance: Tensor) -> None:
        """Record given statistics if a recording is on."""
        if self.recorded is not None:
            self.recorded[layer] = (mean.detach(), variance.detach())

    def record_batch(self, layer: _BatchNorm, x: Tensor) -> None:
        """Record the batch statistics of `x` if a recording is on."""
        if self.recorded is not None:
            self.record(layer, *channel_statistics(x.detach()))

    @torch.no_grad()
    def count(self, layer: _BatchNorm, batch: Pair) -> None:
        """Enter a batch's statistics into the layer's average, where one waits for them."""
        for average, fresh in zip(self.targets.pop(layer, ()), batch, strict=False):
            average.lerp_(fresh.to(average.dtype), self.target_momentum)


class BatchRule:
    """A rule that computes statistics of the batch. One value per channel has none: the running ones are used then."""

    needs_running = False  # a layer without running statistics is normalised by the batch's alone

    def __call__(self, layer: _BatchNorm, forward: Forward, x: Tensor, control: NormControl) -> Tensor:
        """Normalise by `normalise`, where there are the statistics that it needs."""
        if layer.running_mean is None:
            rule = BatchStatistics() if self.needs_running else self
            return rule.normalise(layer, forward, x, control)
        if x.numel() // max(x.shape[1], 1) < 2:
            return RunningStatistics()(layer, forward, x, control)
        return self.normalise(layer, forward, x, control)

    def normalise(self, layer: _BatchNorm, forward: Forward, x: Tensor, control: NormControl) -> Tensor:
        """Normalise by `statistics`; gradients flow through them."""
        used = self.statistics(layer, x, control)
        control.record(layer, *used)
        return normalise(layer, forward, x, *used)

    def statistics(self, layer: Any, x: Tensor, control: NormControl) -> Pair:
        """Return the mean and variance of each channel to normalise by."""
        raise NotImplementedError


class BatchStatistics(BatchRule):
    """The current batch's statistics; running statistics are not updated."""

    def normalise(self, layer: _BatchNorm, forward: Forward, x: Tensor, control: NormControl) -> Tensor:
        """Normalise as in training mode; an average that waits for the batch takes the place of the running buffers."""
        control.record_batch(layer, x)
        mean, variance = control.targets.pop(layer, (None, None))
        average = {"running_mean": mean, "running_var": variance, "num_batches_tracked": None}
        with hiding(layer, training=True, track_running_stats=True, momentum=control.target_momentum, **average):
            return forward(x)


class TargetStatistics(Stateful):
    """The mean of each channel's statistics, of all batches so far or of about the last `RECENT`.

    A plain network normalises by fixed statistics. Where adaptation uses those of each batch, an export puts this
    average in their place. It costs almost nothing: the fused kernel that normalises a batch also updates running
    buffers, and it is given these instead of the layer's own.
    """

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
        if self.mean is None or self.variance is None:
            means = torch.cat([layer.running_mean for layer in control.columns] or [torch.empty(0)])
            self.mean, self.variance = torch.zeros_like(means), torch.zeros_like(means)
        return {layer: (self.mean[columns], self.variance[columns]) for layer, columns in control.columns.items()}


def install(module: nn.Module) -> NormControl:
    """Make every BatchNorm layer below `module` follow one new control, and return it."""
    control = NormControl(layers=[layer for layer in module.modules() if isinstance(layer, _BatchNorm)])
    for layer in control.layers:
        vars(layer)["forward"] = partial(_forward, layer, control)
    return control


def uninstall(module: nn.Module) -> None:
    """Give every BatchNorm layer its own forward back."""
    for layer in module.modules():
        if isinstance(layer, _BatchNorm):
            vars(layer).pop("forward", None)


def _forward(layer: Any, control: NormControl, x: Tensor) -> Tensor:
    """Run a layer as its control says."""
    original: Forward = partial(type(layer).forward, layer)
    if isinstance(control.rule, RunningStatistics) and not layer.training:
        return original(x)  # nothing to hide: the way of most passes
    parts = [x] if control.groups == 1 else x.chunk(control.groups)
    outputs = [control.rule(layer, original, part, control) for part in parts]
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


@contextmanager
def hiding(layer: object, **attributes: Any) -> Iterator[None]:
    """Let instance attributes hide others, and a layer's parameters, buffers and flags, inside the block."""
    before = {name: vars(layer)[name] for name in attributes if name in vars(layer)}
    vars(layer).update(attributes)
    try:
        yield
    finally:
        for name in attributes:
            del vars(layer)[name]
        vars(layer).update(before)


def normalise(
    layer: _BatchNorm, forward: Forward, x: Tensor, mean: Tensor, variance: Tensor, affine: Pair | None = None
) -> Tensor:
    """Run `forward` with given statistics (and another scale and shift than the layer's), differentiable in them.

    The statistics are folded into the affine parameters, whose gradients the fused kernel does compute.
    """
    weight, bias = (layer.weight, layer.bias) if affine is None else affine
    scale = torch.rsqrt(variance + layer.eps)
    if weight is not None:
        scale = scale * weight
    shift = -mean * scale if bias is None else bias - mean * scale
    zero, one = torch.zeros_like(mean), torch.full_like(mean, 1 - layer.eps)
    with hiding(layer, training=False, weight=scale, bias=shift, running_mean=zero, running_var=one):
        return forward(x)


def normalise_each(layer: _BatchNorm, forward: Forward, x: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
    """Run `forward` with statistics of each sample [B, C], differentiable in them."""
    shape = *mean.shape, *[1] * (x.ndim - 2)
    x = (x - mean.to(x.dtype).view(shape)) * torch.rsqrt(variance + layer.eps).to(x.dtype).view(shape)
    zero = torch.zeros(x.shape[1], device=x.device, dtype=torch.promote_types(x.dtype, torch.float32))
    return normalise(layer, forward, x, zero, zero + (1 - layer.eps))  # the affine part, and what is fused to it


def channel_statistics(x: Tensor, correction: int = 0) -> Pair:
    """Return mean and variance of every channel."""
    variance, mean = variance_and_mean(x, [dim for dim in range(x.ndim) if dim != 1], correction)
    return mean.flatten(), variance.flatten()
