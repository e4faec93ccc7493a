"""The rules by which methods let BatchNorm layers normalise, each from its paper, and what the setting `norm` means.

`dpl.network.norm_control` has the mechanism and the two plainest rules. What a rule remembers of the stream lies side
by side for all layers in a few declared tensors, so reset and snapshots know it. It moves while a method adapts
(`NormControl.adapting`), not when it only predicts; a teacher's network uses it as it is.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from dpl.core.errors import SettingError
from dpl.core.numerics import at_least_float32, variance_and_mean
from dpl.core.random import Random
from dpl.core.state import Stateful
from dpl.network.norm_control import (
    BatchRule,
    BatchStatistics,
    Forward,
    NormControl,
    Pair,
    Rule,
    RunningStatistics,
    Statistics,
    channel_statistics,
    hiding,
    normalise,
    normalise_each,
)

__all__ = [
    "ALIKE", "BY_CHANCE", "ENOUGH", "FULL_BATCH", "RULES", "STREAM", "UNKNOWN", "AutoBlend", "BatchRenormalisation",
    "BatchStatistics", "BlendedStatistics", "EarlyBatch", "MeasuredShift", "MedianStatistics", "RecordedStatistics",
    "RunningStatistics", "StreamRule", "TrackRunning", "UnMix", "batch_share", "blend", "parse_norm",
]  # fmt: skip

ENOUGH = 16  # images of a batch that tell how far it has shifted, and how alike its images are
FULL_BATCH = 32  # images; a smaller one has the same share of statistics, and a lower learning rate
STREAM = 2048  # images that the averages of the stream reach back to
# A batch is not mixed if its images look this many times as alike, and by this share of pairs more, where late layers
# keep the source statistics.
ALIKE, BY_CHANCE = 1.5, 0.015
UNKNOWN = 1e4  # the shift until it is measured: larger than any, also in half precision


@dataclass(frozen=True)
class BlendedStatistics(BatchRule):
    """(1 - share) running statistics + share batch statistics; gradients flow through the batch's part.

    The batch variance is the unbiased one, as the running variance is.
    """

    share: float
    correction: int = 1
    needs_running = True

    def statistics(self, layer: Any, x: Tensor, control: NormControl) -> Pair:
        """Return the blend."""
        batch = channel_statistics(x, self.correction)
        control.count(layer, batch)
        return blend((layer.running_mean, layer.running_var), batch, self.share)


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

    def statistics(self, layer: Any, x: Tensor, control: NormControl) -> Pair:
        """Return them; gradients flow through the element that is the median."""
        values = at_least_float32(x).transpose(0, 1).flatten(1)
        median = values.median(dim=1).values
        variance = (values - median[:, None]).square().mean(dim=1)
        control.count(layer, (median, variance))
        return median, variance


@dataclass(frozen=True)
class RecordedStatistics:
    """The statistics that an earlier pass used (see `NormControl.recording`)."""

    statistics: Statistics

    def __call__(self, layer: _BatchNorm, forward: Forward, x: Tensor, control: NormControl) -> Tensor:
        """Normalise by what was recorded for this layer, or by running statistics if nothing was."""
        mean, variance = self.statistics.get(layer, (layer.running_mean, layer.running_var))
        with hiding(layer, training=False, running_mean=mean, running_var=variance):
            return forward(x)


class StreamRule(BatchRule, Stateful):
    """A rule with a memory."""

    needs_running = True

    def attach(self, control: NormControl, random: Random) -> None:
        """Declare the memory for all layers with running statistics."""
        source = [torch.zeros(2, 0, device=random.device)]
        source += [torch.stack((layer.running_mean, layer.running_var)) for layer in control.columns]
        mean, variance = at_least_float32(torch.cat(source, dim=1))
        memory = self.first(mean, variance, random)
        self.declare(**memory)
        self.change_in_place(*memory)

    def first(self, mean: Tensor, variance: Tensor, random: Random) -> dict[str, Tensor]:
        """Return the memory to begin with, given the source statistics of all layers [channels]."""
        raise NotImplementedError


class AutoBlend(StreamRule):
    """A blend whose share follows the effective size of the batch and the size of the shift (`norm="auto"`).

        n_e = n / (1 + (n - 1) rho),   share = n_e / (n_e + prior min(1, n / 32)) g,   g = max(0, 1 - (least / shift)^2)

    rho says how much more alike the images of a batch are than any two images, and the shift how far their means lie
    from the source statistics; dpl.methods.parts.effective_batch measures both. Mixed batches below 32 have the share
    of one of 32: even the statistics of one image, in so small a share, mend more of a shift than they cost. Where
    nothing has shifted they only cost, so there the source statistics stay. Every network that holds the rule follows
    it. Nothing is read on the host.

    The rest of the blend are the source statistics. Where batches are not mixed (rho > 0), their own statistics say
    little, but the stream's say much: then, in early layers, the rest are g parts of its averages M and V, which start
    as the source statistics and follow each batch with mean m and variance v by r = n / (n + 2048):

        V <- (1 - r) (V + r (m - M)^2) + r v,   M <- M + r (m - M)

    Late layers depend on the classes of the stream, and keep the source statistics. Few classes alone look like a
    shift, so `least` is then larger by `of_classes`.
    """

    means: Tensor  # M, [channels]
    variances: Tensor  # V, [channels]

    def __init__(self, prior: float = 128, least: float = 0.02) -> None:
        super().__init__()
        self.prior = prior  # images that the rest of the blend counts for, beside a batch of 32 or more
        self.least = least  # shift up to which the source statistics stay
        self.rho, self.shift = torch.zeros(()), torch.tensor(UNKNOWN)
        self.of_classes = torch.zeros(())  # shift that may come from the classes of the stream alone

    def first(self, mean: Tensor, variance: Tensor, random: Random) -> dict[str, Tensor]:
        """Begin with the source statistics."""
        return {"means": mean.clone(), "variances": variance.clone()}

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
        return (1 - ((self.least + self.of_classes) / self.shift.clamp(min=1e-9)).square()).clamp(min=0)

    def rest(self, layer: Any, control: NormControl) -> Pair:
        """Mean and variance that the batch's are blended with."""
        source = layer.running_mean, layer.running_var
        if not is_early(layer, control):
            return source
        columns = control.columns[layer]
        of_stream = self.means[columns], self.variances[columns]
        return blend(source, of_stream, self.shifted.where(self.rho > 0, 0))

    def statistics(self, layer: Any, x: Tensor, control: NormControl) -> Pair:
        """Return the present blend, then let the averages follow the batch."""
        batch = channel_statistics(x, 1)
        control.count(layer, batch)
        blended = blend(self.rest(layer, control), batch, self.share(len(x)))
        if control.adapting:
            self._follow(control.columns[layer], *batch, len(x) / (len(x) + STREAM))
        return blended

    @torch.no_grad()
    def _follow(self, columns: slice, mean: Tensor, variance: Tensor, rate: float) -> None:
        M, V = self.means[columns], self.variances[columns]
        away = mean.to(M.dtype) - M
        V.addcmul_(away, away, value=rate).lerp_(variance.to(V.dtype), rate)
        M.add_(away, alpha=rate)


class UnMix(StreamRule):
    """UnMix-TNS: each sample is normalised by a mixture of its own statistics and those of K components.

    Tomar et al., Un-Mixing Test-Time Normalization Statistics: Combatting Label Temporal Correlation, ICLR 2024. With
    the sample's mean m and variance v, and component means M_k and variances V_k,

        a_k = softmax_k(cos(m, M_k) / 0.07),  M'_k = (1 - a_k) M_k + a_k m,  V'_k = (1 - a_k) V_k + a_k v
        mean = avg_k M'_k,    variance = avg_k V'_k + avg_k M'_k² - mean²

    and after use M_k and V_k move towards the batch's m and v by a_k (1 - (1 - momentum)^(B / largest)).
    """

    means: Tensor  # M, [K, channels]
    variances: Tensor  # V, [K, channels]

    def __init__(self, components: int = 16, largest: int = 64) -> None:
        super().__init__()
        self.components, self.largest = components, largest

    def first(self, mean: Tensor, variance: Tensor, random: Random) -> dict[str, Tensor]:
        """Scatter the components around the source statistics, which half of the variance explains."""
        shape, k = (self.components, len(mean)), self.components
        noise = torch.randn(shape, generator=random.generator, dtype=mean.dtype).to(mean.device)
        scatter = (0.5 * k / (k - 1) * variance).sqrt() * noise
        return {"means": mean + scatter, "variances": (0.5 * variance).expand(shape).clone()}

    def normalise(self, layer: _BatchNorm, forward: Forward, x: Tensor, control: NormControl) -> Tensor:
        """Normalise each sample, then move the components."""
        columns = control.columns[layer]
        M, V, k = self.means[:, columns], self.variances[:, columns], self.components
        maps = x if x.ndim > 2 else x[..., None]
        v, m = (s.flatten(1).to(M.dtype) for s in variance_and_mean(maps, range(2, maps.ndim)))
        with torch.no_grad():
            a = (F.normalize(m, dim=1) @ F.normalize(M, dim=1).T / 0.07).softmax(dim=1)  # [B, K]
        mean = ((1 - a) @ M + m) / k  # the shares of a sample sum up to one
        square = ((1 - a) ** 2 @ M**2 + 2 * m * (a * (1 - a) @ M) + a.square().sum(dim=1, keepdim=True) * m**2) / k
        variance = (((1 - a) @ V + v) / k + square - mean**2).clamp(min=0)
        if control.adapting:
            with torch.no_grad():
                momentum = layer.momentum or 0.1
                pace = (1 - (1 - momentum) ** (len(x) / self.largest)) / len(x)
                taken = a.sum(dim=0)[:, None]
                self.means[:, columns] = M + pace * (a.T @ m - taken * M)
                self.variances[:, columns] = V + pace * (a.T @ v - taken * V)
        return normalise_each(layer, forward, x, mean, variance)


class BatchRenormalisation(StreamRule):
    """Test-time batch renormalisation: moving averages of the stream's statistics in value, the batch's in gradient.

    Zhao et al., DELTA: degradation-free fully test-time adaptation, ICLR 2023. With mean m and deviation s of the batch
    and their moving averages M and S (at first the first batch's; those of earlier batches when they are used)

        y = (x - m) / s r + d,    r = s / S,    d = (m - M) / S,    no gradient through r and d.
    """

    means: Tensor  # M, [channels]
    deviations: Tensor  # S, [channels]; zero before the first batch

    def __init__(self, momentum: float = 0.95) -> None:
        super().__init__()
        self.momentum = momentum

    def first(self, mean: Tensor, variance: Tensor, random: Random) -> dict[str, Tensor]:
        """Begin without averages."""
        return {"means": torch.zeros_like(mean), "deviations": torch.zeros_like(variance)}

    def normalise(self, layer: _BatchNorm, forward: Forward, x: Tensor, control: NormControl) -> Tensor:
        """Renormalise the batch, then move the averages."""
        columns = control.columns[layer]
        mean, variance = (s.to(self.means.dtype) for s in channel_statistics(x))
        with torch.no_grad():
            deviation = (variance + layer.eps).sqrt()
            first = self.deviations[columns] == 0
            M = torch.where(first, mean, self.means[columns])
            S = torch.where(first, deviation, self.deviations[columns])
            r, d = deviation / S, (mean - M) / S
            if control.adapting:
                self.means[columns] = torch.lerp(mean, M, self.momentum)
                self.deviations[columns] = torch.lerp(deviation, S, self.momentum)
        control.record(layer, M, S**2 - layer.eps)
        weight = torch.ones_like(r) if layer.weight is None else layer.weight
        bias = torch.zeros_like(d) if layer.bias is None else layer.bias
        return normalise(layer, forward, x, mean, variance, (weight * r, weight * d + bias))


@dataclass(frozen=True)
class EarlyBatch:
    """Batch statistics in the first layers, source statistics in the last third.

    Early layers see the style of the images, and late ones their classes. So most of a shift is taken off, but a batch
    of one class keeps what makes it one class.
    """

    def __call__(self, layer: _BatchNorm, forward: Forward, x: Tensor, control: NormControl) -> Tensor:
        """Normalise one layer."""
        rule = BatchStatistics() if is_early(layer, control) else RunningStatistics()
        return rule(layer, forward, x, control)


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


def is_early(layer: _BatchNorm, control: NormControl) -> bool:
    """Say whether a layer is not among the last third."""
    return 3 * control.layers.index(layer) < 2 * len(control.layers)


def blend(rest: Pair, own: Pair, share: Tensor | float) -> Pair:
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


def parse_norm(norm: str | float, prior: float = 128, least_shift: float = 0.02) -> Rule:
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
