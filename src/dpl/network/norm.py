"""The rules by which BatchNorm layers normalise, and what the setting `norm` means.

`norm_control` has the mechanism and the two plainest rules, `stream_norm` the rules that remember the stream.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from dpl.core.errors import SettingError
from dpl.core.numerics import at_least_float32
from dpl.core.random import Random
from dpl.network.norm_control import (
    BatchRule,
    BatchStatistics,
    Forward,
    NormControl,
    Rule,
    RunningStatistics,
    Statistics,
    channel_statistics,
    hiding,
    normalise,
)
from dpl.network.stream_norm import BatchRenormalisation, StreamRule, UnMix

__all__ = [
    "ENOUGH", "FULL_BATCH", "RULES", "STREAM", "UNKNOWN", "AutoBlend", "BatchStatistics", "BlendedStatistics",
    "MeasuredShift", "MedianStatistics", "RecordedStatistics", "RunningStatistics", "TrackRunning", "batch_share",
    "blend", "parse_norm",
]  # fmt: skip

ENOUGH = 16  # images of a batch that tell how far it has shifted, and how alike its images are
FULL_BATCH = 32  # images; a smaller one has the same share of statistics, and a lower learning rate
STREAM = 2048  # images that the averages of the stream reach back to
UNKNOWN = 1e4  # the shift until it is measured: larger than any, also in half precision


@dataclass(frozen=True)
class BlendedStatistics(BatchRule):
    """(1 - share) running statistics + share batch statistics; gradients flow through the batch's part.

    The batch variance is the unbiased one, as the running variance is.
    """

    share: Tensor | float
    correction: int = 1
    needs_running = True

    def normalise(self, layer: _BatchNorm, forward: Forward, x: Tensor, control: NormControl) -> Tensor:
        """Normalise by the blended statistics."""
        variance, mean = channel_statistics(x, self.correction)
        control.count(layer, mean, variance)
        mean, variance = blend((layer.running_mean, layer.running_var), (mean, variance), self.share)
        control.record(layer, mean, variance)
        return normalise(layer, forward, x, mean, variance)


@dataclass(frozen=True)
class TrackRunning(BatchRule):
    """Batch statistics that also update the running ones, as in training.

    With `learning_only` they are updated where gradients are computed, and not in a pass that only predicts.
    """

    learning_only: bool = False
    momentum: float | None = None  # by which they move; None: the layer's own

    def normalise(self, layer: _BatchNorm, forward: Forward, x: Tensor, control: NormControl) -> Tensor:
        """Normalise as in training mode."""
        if self.learning_only and not torch.is_grad_enabled():
            return BatchStatistics().normalise(layer, forward, x, control)
        control.record_batch(layer, x)
        with hiding(layer, training=True, momentum=layer.momentum if self.momentum is None else self.momentum):
            return forward(x)


class MedianStatistics(BatchRule):
    """MedBN: the batch's median of each channel, and the mean squared deviation from it.

    Park et al., MedBN: Robust Test-Time Adaptation against Malicious Test Samples, CVPR 2024. A few extreme samples
    cannot move the median far. Of an even number of values it is the lower one of the middle.
    """

    def normalise(self, layer: _BatchNorm, forward: Forward, x: Tensor, control: NormControl) -> Tensor:
        """Normalise around the median; gradients flow through the element that it is."""
        values = at_least_float32(x).transpose(0, 1).flatten(1)
        median = values.median(dim=1).values
        variance = (values - median[:, None]).square().mean(dim=1)
        control.count(layer, median, variance)
        control.record(layer, median, variance)
        return normalise(layer, forward, x, median.to(x.dtype), variance.to(x.dtype))


@dataclass(frozen=True)
class RecordedStatistics:
    """The statistics that an earlier pass used (see `NormControl.recording`)."""

    statistics: Statistics

    def __call__(self, layer: _BatchNorm, forward: Forward, x: Tensor, control: NormControl) -> Tensor:
        """Normalise by what was recorded for this layer, or by running statistics if nothing was."""
        if layer not in self.statistics:
            return RunningStatistics()(layer, forward, x, control)
        mean, variance = self.statistics[layer]
        with hiding(layer, training=False, running_mean=mean, running_var=variance):
            return forward(x)


class AutoBlend(StreamRule):
    """A blend whose share follows the effective size of the batch and the size of the shift (`norm="auto"`).

        n_e = n / (1 + (n - 1) rho),   share = n_e / (n_e + prior min(1, n / 32)) g,   g = max(0, 1 - (least / shift)^2)

    rho says how much more alike the images of a batch are than any two images, and the shift how far their means lie
    from the source statistics; dpl.methods.parts.effective_batch measures both. Mixed batches below 32 have the share
    of one of 32: even the statistics of one image, in so small a share, mend more of a shift than they cost. Where
    nothing has shifted they only cost, so there the source statistics stay. Every network that holds the rule follows
    it. Nothing is read on the host.

    The rest of the blend are the source statistics. Where batches are not mixed (rho > 0), their own statistics say
    little, but the stream's say much: then the rest are g parts of its averages M and V, which start as the source
    statistics and follow each batch with mean m and variance v by r = n / (n + 2048):

        V <- (1 - r) (V + r (m - M)^2) + r v,   M <- M + r (m - M)
    """

    means: Tensor  # M, [channels]
    variances: Tensor  # V, [channels]
    prior: float = 128  # images that the rest of the blend counts for, beside a batch of 32 or more
    least: float = 0.02  # shift up to which the source statistics stay

    def __init__(self, prior: float = prior, least: float = least) -> None:
        super().__init__()
        self.prior, self.least = prior, least
        self.rho, self.shift = torch.zeros(()), torch.tensor(UNKNOWN)

    def start(self, mean: Tensor, variance: Tensor, random: Random) -> None:
        """Begin with the source statistics."""
        self.declare(means=mean, variances=variance)
        self.change_in_place("means", "variances")

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
        return (1 - (self.least / self.shift.clamp(min=1e-9)).square()).clamp(min=0)

    def rest(self, layer: Any) -> tuple[Tensor, Tensor]:
        """Mean and variance that the batch's are blended with."""
        columns, of_source = vars(layer)["norm_columns"], (layer.running_mean, layer.running_var)
        of_stream = blend(of_source, (self.means[columns], self.variances[columns]), self.shifted)
        mean, variance = (torch.where(self.rho > 0, *pair) for pair in zip(of_stream, of_source, strict=True))
        return mean, variance

    def normalise(self, layer: _BatchNorm, forward: Forward, x: Tensor, control: NormControl) -> Tensor:
        """Normalise by the present blend, then let the averages follow the batch."""
        variance, mean = channel_statistics(x, 1)
        control.count(layer, mean, variance)
        blended = blend(self.rest(layer), (mean, variance), self.share(len(x)))
        if control.adapting:
            self._follow(vars(layer)["norm_columns"], mean, variance, len(x) / (len(x) + STREAM))
        control.record(layer, *blended)
        return normalise(layer, forward, x, *blended)

    @torch.no_grad()
    def _follow(self, columns: slice, mean: Tensor, variance: Tensor, rate: float) -> None:
        M, V = self.means[columns], self.variances[columns]
        away = mean.to(M.dtype) - M
        V.addcmul_(away, away, value=rate).lerp_(variance.to(V.dtype), rate)
        M.add_(away, alpha=rate)


@dataclass(frozen=True)
class MeasuredShift:
    """Source statistics; beside, how far the images lie from them.

    In each layer it is the squared distance of the images' mean from the running mean, minus what chance gives to so
    few images, in units of the running variance; on average over channels.
    """

    by_layer: list[Tensor] = field(default_factory=list)
    moves: list[Tensor] = field(default_factory=list)  # of each channel's mean, in running deviations

    def __call__(self, layer: _BatchNorm, forward: Forward, x: Tensor, control: NormControl) -> Tensor:
        """Normalise by the source statistics, and measure."""
        one = len(x) == 1  # it has no spread
        if layer.running_mean is not None and layer.running_var is not None and not one:
            means = at_least_float32(x).flatten(2).mean(dim=2) if x.ndim > 2 else at_least_float32(x)
            by_chance = means.var(dim=0) / len(means)
            move, variance = means.mean(dim=0) - layer.running_mean, layer.running_var + layer.eps
            self.by_layer.append(((move.square() - by_chance) / variance).mean())
            self.moves.append(move * variance.rsqrt())
        return RunningStatistics()(layer, forward, x, control)

    def added_to(self, before: Tensor, images: int) -> Tensor:
        """Return the average over layers, and over the images before if these are fewer than `ENOUGH`."""
        if not self.by_layer:
            return before
        now = torch.stack(self.by_layer).mean().nan_to_num().to(before.dtype)  # a broken image must not stay
        return torch.where(before > UNKNOWN / 2, now, before).lerp(now, min(1.0, images / ENOUGH))


def blend(rest: tuple[Any, Any], own: tuple[Tensor, Tensor], share: Tensor | float) -> tuple[Tensor, Tensor]:
    """Return 1 - share of the first mean and variance and share of the second, in the type of the first."""
    kind = rest[0].dtype
    share = share.to(kind) if isinstance(share, Tensor) else share
    return torch.lerp(rest[0], own[0].to(kind), share), torch.lerp(rest[1], own[1].to(kind), share)


def batch_share(rule: Rule, count: int) -> float | None:
    """Return the share of batch statistics, the rest being running ones, for `count` images; None: no fixed ones."""
    if isinstance(rule, AutoBlend | BlendedStatistics):
        return float(rule.share(count) if isinstance(rule, AutoBlend) else rule.share)
    # Tracked running statistics follow the target themselves.
    shares = {RunningStatistics: 0.0, TrackRunning: 0.0, BatchStatistics: 1.0, MedianStatistics: 1.0}
    return shares.get(type(rule))


RULES: dict[str, Callable[[], Rule]] = {
    "running": RunningStatistics,
    "batch": BatchStatistics,
    "track": lambda: TrackRunning(learning_only=True),
    "median": MedianStatistics,
    "unmix": UnMix,
    "renorm": BatchRenormalisation,
}


def parse_norm(norm: str | float, prior: float = AutoBlend.prior, least_shift: float = AutoBlend.least) -> Rule:
    """Return the rule for a `norm` setting: "running", "batch", "track", "auto" or a share of batch statistics."""
    if isinstance(norm, (int, float)) and not isinstance(norm, bool) and 0 <= norm <= 1:
        return RunningStatistics() if norm == 0 else BatchStatistics() if norm == 1 else BlendedStatistics(float(norm))
    if norm == "auto":
        return AutoBlend(prior, least_shift)
    if isinstance(norm, str) and norm in RULES:
        return RULES[norm]()
    raise SettingError(
        f"norm={norm!r}: expected 'running' (source statistics), 'batch' (the batch's own), 'median' (around the "
        "batch's median), 'unmix' (components of the stream), 'renorm' (averages of the stream), 'track' (the batch's, "
        "which also update the running ones), a number from 0 to 1 (the batch's share in a blend) or 'auto' (that "
        "share by the effective size of the batch and the size of the shift)"
    )
