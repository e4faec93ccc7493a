"""Which statistics a network's batch-normalisation layers use, switched without touching their parameters.

Every BatchNorm layer of the private copy gets a subclass of its own class whose forward asks one shared
`NormControl` for a rule. Rules only shadow attributes for the length of one call, so `state_dict` keys, buffers and
activations fused into the layer (timm's BatchNormAct2d) stay as they are, and `uninstall` puts the class back.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from dpl.core.errors import SettingError
from dpl.core.numerics import variance_and_mean
from dpl.network.subclass import Subclasses, put_back

__all__ = [
    "Batch", "Blend", "Chosen", "NormControl", "Recall", "Rule", "Running", "Track", "blend", "channel_statistics",
    "has_statistics", "install", "parse_norm", "uninstall",
]  # fmt: skip

Forward = Callable[[Tensor], Tensor]


class Rule(Protocol):
    """How one layer normalises one input; `forward` is the layer's original forward."""

    def __call__(self, layer: _BatchNorm, forward: Forward, x: Tensor, control: "NormControl") -> Tensor:
        """Return the layer's output."""


@dataclass(frozen=True)
class Running:
    """The source's running statistics, never updated."""

    def __call__(self, layer: _BatchNorm, forward: Forward, x: Tensor, control: "NormControl") -> Tensor:
        """Normalise as in evaluation mode."""
        with _shadow(layer, training=False):
            return forward(x)


@dataclass(frozen=True)
class Batch:
    """The current batch's statistics; running statistics stay as they are."""

    def __call__(self, layer: _BatchNorm, forward: Forward, x: Tensor, control: "NormControl") -> Tensor:
        """Normalise by the batch, or by the source where one value per channel has no variance."""
        own = control.own_rows(x)
        if _values_per_channel(own) < 2 and layer.running_mean is not None:
            return Running()(layer, forward, x, control)
        control.note(layer, own)
        if own is not x:
            variance, mean = channel_statistics(own)
            return normalise(layer, forward, x, mean, variance)
        with _shadow(layer, training=True, track_running_stats=False):
            return forward(x)


@dataclass(frozen=True)
class Blend:
    """(1 - share) source statistics + share batch statistics; gradients flow through the batch's part.

    The batch variance is the unbiased one, as the source's running variance is.
    """

    share: float
    correction: int = 1

    def __call__(self, layer: _BatchNorm, forward: Forward, x: Tensor, control: "NormControl") -> Tensor:
        """Normalise by the blended statistics."""
        own = control.own_rows(x)
        if layer.running_mean is None or layer.running_var is None or _values_per_channel(own) < 2:
            fallback: Rule = Batch() if layer.running_mean is None else Running()
            return fallback(layer, forward, x, control)
        variance, mean = channel_statistics(own, self.correction)
        mean = torch.lerp(layer.running_mean, mean.to(layer.running_mean.dtype), self.share)
        variance = torch.lerp(layer.running_var, variance.to(layer.running_var.dtype), self.share)
        control.keep(layer, mean, variance)
        return normalise(layer, forward, x, mean, variance)


@dataclass(frozen=True)
class Track:
    """Batch statistics that also move the running ones, as in training.

    With `learning_only` they move where gradients are computed and stay in a pass that only predicts.
    """

    learning_only: bool = False

    def __call__(self, layer: _BatchNorm, forward: Forward, x: Tensor, control: "NormControl") -> Tensor:
        """Normalise as in training mode."""
        if self.learning_only and not torch.is_grad_enabled():
            return Batch()(layer, forward, x, control)
        if _values_per_channel(x) < 2:
            return Running()(layer, forward, x, control)
        with _shadow(layer, training=True):
            return forward(x)


@dataclass
class Chosen:
    """A blend whose share is chosen while the stream runs (`norm="auto"`); every network that holds it follows."""

    share: float = 0.0

    def __call__(self, layer: _BatchNorm, forward: Forward, x: Tensor, control: "NormControl") -> Tensor:
        """Normalise by the blend of the moment."""
        return blend(self.share)(layer, forward, x, control)


@dataclass(frozen=True)
class Recall:
    """The very statistics that an earlier pass used (see `NormControl.recording`)."""

    statistics: dict[_BatchNorm, tuple[Tensor, Tensor]]

    def __call__(self, layer: _BatchNorm, forward: Forward, x: Tensor, control: "NormControl") -> Tensor:
        """Normalise by what was recorded for this layer, or by the source if it recorded nothing."""
        if layer not in self.statistics:
            return Running()(layer, forward, x, control)
        mean, variance = self.statistics[layer]
        with _shadow(layer, training=False, running_mean=mean, running_var=variance):
            return forward(x)


@dataclass
class NormControl:
    """The rule that all layers of one network follow."""

    rule: Rule = field(default_factory=Running)
    rows: int | None = None  # only the first `rows` of a batch define its statistics
    groups: int = 1  # a batch of this many equal parts, each normalised by itself (augmented views run together)
    recorded: dict[_BatchNorm, tuple[Tensor, Tensor]] | None = None
    layers: int = 0  # that follow it

    @property
    def keeps_samples_apart(self) -> bool:
        """Say whether the rule normalises each sample without looking at the others."""
        rule = self.rule
        return isinstance(rule, Running) or (isinstance(rule, Chosen) and rule.share == 0) or not self.layers

    @contextmanager
    def using(self, rule: Rule | None = None, *, rows: int | None = None, groups: int = 1) -> Iterator[None]:
        """Follow another rule (or the same one on part of the batch, or on each of its parts) inside the block."""
        before = self.rule, self.rows, self.groups
        self.rule, self.rows, self.groups = rule or self.rule, rows, groups
        try:
            yield
        finally:
            self.rule, self.rows, self.groups = before

    @contextmanager
    def recording(self) -> Iterator[dict[_BatchNorm, tuple[Tensor, Tensor]]]:
        """Record the statistics that each layer uses inside the block."""
        self.recorded = {}
        try:
            yield self.recorded
        finally:
            self.recorded = None

    def own_rows(self, x: Tensor) -> Tensor:
        """Return the part of `x` that defines the statistics."""
        return x if self.rows is None or self.rows >= len(x) else x[: self.rows]

    def note(self, layer: _BatchNorm, x: Tensor) -> None:
        """Record the batch statistics of `x` if somebody asked for them."""
        if self.recorded is not None:
            variance, mean = channel_statistics(x.detach())
            self.keep(layer, mean, variance)

    def keep(self, layer: _BatchNorm, mean: Tensor, variance: Tensor) -> None:
        """Record given statistics if somebody asked for them."""
        if self.recorded is not None:
            self.recorded[layer] = (mean.detach(), variance.detach())


_NAMED: dict[str, Rule] = {"running": Running(), "batch": Batch(), "track": Track(learning_only=True)}


def install(module: nn.Module) -> NormControl:
    """Make every BatchNorm layer below `module` follow one new control, and return it."""
    control = NormControl()
    for layer in list(module.modules()):
        if isinstance(layer, _BatchNorm):
            _following.take(layer, norm_control=control)
            control.layers += 1
    return control


def uninstall(module: nn.Module) -> None:
    """Give every BatchNorm layer its own class back."""
    for layer in module.modules():
        if isinstance(layer, _BatchNorm):
            put_back(layer, "norm_control")


def has_statistics(module: nn.Module) -> bool:
    """Say whether `module` has BatchNorm layers with running statistics."""
    return any(isinstance(layer, _BatchNorm) and layer.running_mean is not None for layer in module.modules())


def blend(share: float) -> Rule:
    """Return the rule that takes this share, 0 to 1, of the statistics from the batch."""
    return Running() if share == 0 else Batch() if share == 1 else Blend(float(share))


def parse_norm(norm: str | float) -> Rule:
    """Return the rule for a `norm` setting: "running", "batch", "track", "auto" or a share of batch statistics."""
    if isinstance(norm, (int, float)) and not isinstance(norm, bool) and 0 <= norm <= 1:
        return blend(norm)
    if norm == "auto":
        return Chosen()
    if isinstance(norm, str) and norm in _NAMED:
        return _NAMED[norm]
    raise SettingError(
        f"norm={norm!r}: expected 'running' (source statistics), 'batch' (the batch's own), 'track' (the batch's, "
        "which also move the running ones), a number from 0 to 1 (the batch's share in a blend) or 'auto' (that share "
        "chosen from the stream)"
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
    with _shadow(layer, training=False, weight=scale, bias=shift, running_mean=zero, running_var=one):
        return forward(x)


def channel_statistics(x: Tensor, correction: int = 0) -> tuple[Tensor, Tensor]:
    """Return variance and mean of every channel."""
    variance, mean = variance_and_mean(x, [dim for dim in range(x.ndim) if dim != 1], correction)
    return variance.flatten(), mean.flatten()


def _values_per_channel(x: Tensor) -> int:
    return x.numel() // max(x.shape[1], 1)


@contextmanager
def _shadow(layer: nn.Module, **attributes: Any) -> Iterator[None]:
    """Let instance attributes hide parameters, buffers and flags for one call."""
    before = {name: vars(layer)[name] for name in attributes if name in vars(layer)}
    vars(layer).update(attributes)
    try:
        yield
    finally:
        for name in attributes:
            del vars(layer)[name]
        vars(layer).update(before)


def _make_forward(original: type[nn.Module]) -> Callable[..., Tensor]:
    def forward(self: Any, x: Tensor) -> Tensor:
        control: NormControl = self.norm_control
        parts = [x] if control.groups == 1 else x.chunk(control.groups)
        outputs = [control.rule(self, lambda y: original.forward(self, y), part, control) for part in parts]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    return forward


_following = Subclasses(_make_forward)
