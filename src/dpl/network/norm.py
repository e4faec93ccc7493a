"""Which statistics a network's BatchNorm layers use, switched without touching their parameters.

Every BatchNorm layer of the private copy gets a subclass of its own class whose forward follows one shared
`NormControl`. Rules hide attributes of a layer for the length of one call, so `state_dict` keys, buffers and
activations fused into the layer (timm's BatchNormAct2d) stay as they are, and `uninstall` restores the class.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from dpl.core.errors import SettingError
from dpl.core.numerics import at_least_float32, variance_and_mean

__all__ = [
    "FULL_BATCH", "UNKNOWN", "AutoBlend", "BatchRule", "BatchStatistics", "BlendedStatistics", "MedianStatistics",
    "NormControl", "RecordedStatistics", "Rule", "RunningStatistics", "Statistics", "TrackRunning", "add_rule",
    "blend_with_running", "channel_statistics", "install", "normalise", "normalise_each", "parse_norm", "uninstall",
]  # fmt: skip

Forward = Callable[[Tensor], Tensor]  # a layer's original forward
Statistics = dict[_BatchNorm, tuple[Tensor, Tensor]]  # mean and variance that a layer used
# How one layer normalises one input: layer, its forward, input, control -> output. A rule that fixed statistics can
# stand for also has `target_share(count)`: the share in them of the statistics of batches of `count` images, the rest
# being the running ones (`dpl.model.export`).
Rule = Callable[[_BatchNorm, Forward, Tensor, "NormControl"], Tensor]
FULL_BATCH = 32  # images; a smaller one has the same share of statistics, and a lower learning rate
UNKNOWN = 1e4  # the shift until it is measured: larger than any, also in half precision
_TINY = 1e-9


@dataclass(frozen=True)
class RunningStatistics:
    """The source model's running statistics, never updated."""

    def target_share(self, count: int) -> float:
        """None."""
        return 0.0

    def __call__(self, layer: _BatchNorm, forward: Forward, x: Tensor, control: "NormControl") -> Tensor:
        """Normalise as in evaluation mode."""
        with _hiding(layer, training=False):
            return forward(x)


class BatchRule:
    """A rule that computes statistics of the batch. One value per channel has none: the running ones are used then."""

    needs_running = False  # a layer without running statistics is normalised by the batch's alone

    def __call__(self, layer: _BatchNorm, forward: Forward, x: Tensor, control: "NormControl") -> Tensor:
        """Normalise by `normalise`, where there are the statistics that it needs."""
        if layer.running_mean is None:
            rule = BatchStatistics() if self.needs_running else self
            return rule.normalise(layer, forward, x, control)
        if x.numel() // max(x.shape[1], 1) < 2:
            return RunningStatistics()(layer, forward, x, control)
        return self.normalise(layer, forward, x, control)

    def normalise(self, layer: _BatchNorm, forward: Forward, x: Tensor, control: "NormControl") -> Tensor:
        """Return the layer's output."""
        raise NotImplementedError


@dataclass(frozen=True)
class BatchStatistics(BatchRule):
    """The current batch's statistics; running statistics are not updated."""

    def target_share(self, count: int) -> float:
        """All."""
        return 1.0

    def normalise(self, layer: _BatchNorm, forward: Forward, x: Tensor, control: "NormControl") -> Tensor:
        """Normalise as in training mode; an average that waits for the batch takes the place of the running buffers."""
        control.record_batch(layer, x)
        hidden: dict[str, Any] = {"training": True, "track_running_stats": False}
        target = control.targets.pop(layer, None)
        if target is not None:
            buffers = {"running_mean": target[0], "running_var": target[1], "num_batches_tracked": None}
            hidden |= {"track_running_stats": True, "momentum": control.target_momentum, **buffers}
        with _hiding(layer, **hidden):
            return forward(x)


@dataclass(frozen=True)
class BlendedStatistics(BatchRule):
    """(1 - share) running statistics + share batch statistics; gradients flow through the batch's part.

    The batch variance is the unbiased one, as the running variance is.
    """

    share: Tensor | float
    correction: int = 1
    needs_running = True

    def target_share(self, count: int) -> float:
        """The share of the blend."""
        return float(self.share)

    def normalise(self, layer: _BatchNorm, forward: Forward, x: Tensor, control: "NormControl") -> Tensor:
        """Normalise by the blended statistics."""
        variance, mean = channel_statistics(x, self.correction)
        control.count(layer, mean, variance)
        mean, variance = blend_with_running(layer, mean, variance, self.share)
        control.record(layer, mean, variance)
        return normalise(layer, forward, x, mean, variance)


@dataclass(frozen=True)
class TrackRunning(BatchRule):
    """Batch statistics that also update the running ones, as in training.

    With `learning_only` they are updated where gradients are computed, and not in a pass that only predicts.
    """

    learning_only: bool = False
    momentum: float | None = None  # by which they move; None: the layer's own

    def target_share(self, count: int) -> float:
        """None: the running statistics follow the target themselves."""
        return 0.0

    def normalise(self, layer: _BatchNorm, forward: Forward, x: Tensor, control: "NormControl") -> Tensor:
        """Normalise as in training mode."""
        if self.learning_only and not torch.is_grad_enabled():
            return BatchStatistics().normalise(layer, forward, x, control)
        control.record_batch(layer, x)
        with _hiding(layer, training=True, momentum=layer.momentum if self.momentum is None else self.momentum):
            return forward(x)


@dataclass(frozen=True)
class MedianStatistics(BatchRule):
    """MedBN: the batch's median of each channel, and the mean squared deviation from it.

    Park et al., MedBN: Robust Test-Time Adaptation against Malicious Test Samples, CVPR 2024. A few extreme samples
    cannot move the median far. Of an even number of values it is the lower one of the middle.
    """

    target_share = BatchStatistics.target_share

    def normalise(self, layer: _BatchNorm, forward: Forward, x: Tensor, control: "NormControl") -> Tensor:
        """Normalise around the median; gradients flow through the element that it is."""
        values = at_least_float32(x).transpose(0, 1).flatten(1)
        median = values.median(dim=1).values
        variance = (values - median[:, None]).square().mean(dim=1)
        control.count(layer, median, variance)
        control.record(layer, median, variance)
        return normalise(layer, forward, x, median.to(x.dtype), variance.to(x.dtype))


@dataclass
class AutoBlend:
    """A blend whose share follows the effective size of the batch and the size of the shift (`norm="auto"`).

        n_e = n / (1 + (n - 1) rho),   share = n_e / (n_e + prior min(1, n / 32)) * max(0, 1 - (least / shift)^2)

    rho says how much more alike the images of a batch are than any two images, and the shift how far their means lie
    from the source statistics; dpl.methods.parts.effective_batch measures both. Mixed batches below 32 have the share
    of one of 32: even the statistics of one image, in so small a share, mend more of a shift than they cost. Where
    nothing has shifted they only cost, so there the source statistics stay. Every network that holds the rule follows
    it. Nothing is read on the host.
    """

    prior: float = 128  # images that the source statistics count for, beside a batch of 32 or more
    least: float = 0.02  # shift up to which they stay
    rho: Tensor = field(default_factory=lambda: torch.zeros(()))
    shift: Tensor = field(default_factory=lambda: torch.tensor(UNKNOWN))

    def effective_size(self, count: int) -> Tensor:
        """n_e of a batch of `count` images."""
        return count / (1 + (count - 1) * self.rho)

    def share(self, count: int) -> Tensor:
        """The share of batch statistics for a batch of `count` images."""
        effective = self.effective_size(count)
        return self.shifted * effective / (effective + self.prior * min(1.0, count / FULL_BATCH))

    @property
    def shifted(self) -> Tensor:
        """0 where nothing has shifted, near 1 where much has."""
        return (1 - (self.least / self.shift.clamp(min=_TINY)).square()).clamp(min=0)

    def target_share(self, count: int) -> float:
        """The share that such a batch has now; reads it on the host."""
        return float(self.share(count))

    def __call__(self, layer: _BatchNorm, forward: Forward, x: Tensor, control: "NormControl") -> Tensor:
        """Normalise by the present blend."""
        return BlendedStatistics(self.share(len(x)))(layer, forward, x, control)


@dataclass(frozen=True)
class RecordedStatistics:
    """The statistics that an earlier pass used (see `NormControl.recording`)."""

    statistics: Statistics

    def __call__(self, layer: _BatchNorm, forward: Forward, x: Tensor, control: "NormControl") -> Tensor:
        """Normalise by what was recorded for this layer, or by running statistics if nothing was."""
        if layer not in self.statistics:
            return RunningStatistics()(layer, forward, x, control)
        mean, variance = self.statistics[layer]
        with _hiding(layer, training=False, running_mean=mean, running_var=variance):
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

    @property
    def per_sample(self) -> bool:
        """Whether the rule normalises each sample without regard to the others."""
        return not self.layers or isinstance(self.rule, RunningStatistics)

    @contextmanager
    def using(self, rule: Rule | None = None, *, groups: int = 1) -> Iterator[None]:
        """Follow another rule (or the same one on each part of the batch) inside the block."""
        before = self.rule, self.groups
        self.rule, self.groups = rule or self.rule, groups
        try:
            yield
        finally:
            self.rule, self.groups = before

    @contextmanager
    def recording(self) -> Iterator[Statistics]:
        """Record the statistics that each layer computes inside the block; running ones are not recorded."""
        self.recorded = {}
        try:
            yield self.recorded
        finally:
            self.recorded = None

    def record_batch(self, layer: _BatchNorm, x: Tensor) -> None:
        """Record the batch statistics of `x` if a recording is on."""
        if self.recorded is not None:
            variance, mean = channel_statistics(x.detach())
            self.record(layer, mean, variance)

    @torch.no_grad()
    def count(self, layer: _BatchNorm, mean: Tensor, variance: Tensor) -> None:
        """Enter a batch's statistics into the layer's average, where one waits for them."""
        target = self.targets.pop(layer, None)
        if target is not None:
            for average, fresh in zip(target, (mean, variance), strict=True):
                average.lerp_(fresh.to(average.dtype), self.target_momentum)

    def record(self, layer: _BatchNorm, mean: Tensor, variance: Tensor) -> None:
        """Record given statistics if a recording is on."""
        if self.recorded is not None:
            self.recorded[layer] = (mean.detach(), variance.detach())


_NAMED: dict[str, Callable[[], Rule]] = {
    "running": RunningStatistics,
    "batch": BatchStatistics,
    "track": lambda: TrackRunning(learning_only=True),
    "median": MedianStatistics,
}


def add_rule(name: str, make: Callable[[], Rule]) -> None:
    """Let `norm=name` mean the rule that `make` returns."""
    _NAMED[name] = make


def install(module: nn.Module) -> NormControl:
    """Make every BatchNorm layer below `module` follow one new control, and return it."""
    control = NormControl()
    for layer in list(module.modules()):
        if isinstance(layer, _BatchNorm):
            layer.__class__ = _controlled(_original_class(layer))
            vars(layer)["norm_control"] = control
            control.layers.append(layer)
    return control


def uninstall(module: nn.Module) -> None:
    """Give every BatchNorm layer its own class back."""
    for layer in module.modules():
        if isinstance(layer, _BatchNorm):
            layer.__class__ = _original_class(layer)
            for name in ("norm_control", "norm_columns"):
                vars(layer).pop(name, None)


def parse_norm(norm: str | float, prior: float = AutoBlend.prior, least_shift: float = AutoBlend.least) -> Rule:
    """Return the rule for a `norm` setting: "running", "batch", "track", "auto" or a share of batch statistics."""
    if isinstance(norm, (int, float)) and not isinstance(norm, bool) and 0 <= norm <= 1:
        ends: dict[float, Rule] = {0: RunningStatistics(), 1: BatchStatistics()}
        return ends.get(norm) or BlendedStatistics(float(norm))
    if norm == "auto":
        return AutoBlend(prior, least_shift)
    if isinstance(norm, str) and norm in _NAMED:
        return _NAMED[norm]()
    raise SettingError(
        f"norm={norm!r}: expected 'running' (source statistics), 'batch' (the batch's own), 'median' (around the "
        "batch's median), 'unmix' (components of the stream), 'renorm' (averages of the stream), 'track' (the batch's, "
        "which also update the running ones), a number from 0 to 1 (the batch's share in a blend) or 'auto' (that "
        "share by the effective size of the batch and the size of the shift)"
    )


def normalise(
    layer: _BatchNorm,
    forward: Forward,
    x: Tensor,
    mean: Tensor,
    variance: Tensor,
    affine: tuple[Tensor, Tensor] | None = None,
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
    with _hiding(layer, training=False, weight=scale, bias=shift, running_mean=zero, running_var=one):
        return forward(x)


def normalise_each(layer: _BatchNorm, forward: Forward, x: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
    """Run `forward` with statistics of each sample [B, C], differentiable in them."""
    shape = *mean.shape, *[1] * (x.ndim - 2)
    x = (x - mean.to(x.dtype).view(shape)) * torch.rsqrt(variance + layer.eps).to(x.dtype).view(shape)
    zero = torch.zeros(x.shape[1], device=x.device, dtype=torch.promote_types(x.dtype, torch.float32))
    return normalise(layer, forward, x, zero, zero + (1 - layer.eps))  # the affine part, and what is fused to it


def channel_statistics(x: Tensor, correction: int = 0) -> tuple[Tensor, Tensor]:
    """Return variance and mean of every channel."""
    variance, mean = variance_and_mean(x, [dim for dim in range(x.ndim) if dim != 1], correction)
    return variance.flatten(), mean.flatten()


def blend_with_running(layer: Any, mean: Tensor, variance: Tensor, share: Tensor | float) -> tuple[Tensor, Tensor]:
    """Return mean and variance with their share in a blend with the running statistics that the layer has."""
    kind = layer.running_mean.dtype
    share = share.to(kind) if isinstance(share, Tensor) else share
    return torch.lerp(layer.running_mean, mean.to(kind), share), torch.lerp(layer.running_var, variance.to(kind), share)


@contextmanager
def _hiding(layer: nn.Module, **attributes: Any) -> Iterator[None]:
    """Let instance attributes hide parameters, buffers and flags for one call."""
    before = {name: vars(layer)[name] for name in attributes if name in vars(layer)}
    vars(layer).update(attributes)
    try:
        yield
    finally:
        for name in attributes:
            del vars(layer)[name]
        vars(layer).update(before)


@cache
def _controlled(original: type[_BatchNorm]) -> type[_BatchNorm]:
    """Return the subclass of a layer's class that follows a `NormControl`."""

    def forward(self: Any, x: Tensor) -> Tensor:
        control: NormControl = self.norm_control
        if isinstance(control.rule, RunningStatistics) and not self.training:
            return original.forward(self, x)  # nothing to hide: the way of most passes
        parts = [x] if control.groups == 1 else x.chunk(control.groups)
        outputs = [control.rule(self, lambda y: original.forward(self, y), part, control) for part in parts]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    return type(original.__name__, (original,), {"forward": forward, "original_class": original})


def _original_class(layer: nn.Module) -> Any:
    return getattr(type(layer), "original_class", type(layer))
