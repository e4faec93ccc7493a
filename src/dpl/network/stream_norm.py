"""Normalisation rules that remember the stream: UnMix-TNS (`norm="unmix"`), batch renormalisation (`norm="renorm"`).

What a rule remembers of all layers lies side by side in a few declared tensors, so reset and snapshots know it. It
moves while a method adapts (`NormControl.adapting`), not when it only predicts; a teacher's network uses it as it is.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from dpl.core.numerics import at_least_float32, variance_and_mean
from dpl.core.random import Random
from dpl.core.state import Stateful
from dpl.network.norm_control import BatchRule, Forward, NormControl, channel_statistics, normalise, normalise_each

__all__ = ["BatchRenormalisation", "StreamRule", "UnMix"]


class StreamRule(BatchRule, Stateful):
    """A rule with a memory."""

    needs_running = True

    def attach(self, module: nn.Module, random: Random) -> None:
        """Give each layer with running statistics its columns in the memory, and fill the memory."""
        empty, first = torch.zeros(0, device=random.device), 0
        means, variances = [empty], [empty]
        for layer in module.modules():
            if isinstance(layer, _BatchNorm) and layer.running_mean is not None and layer.running_var is not None:
                means.append(layer.running_mean)
                variances.append(layer.running_var)
                vars(layer)["norm_columns"] = slice(first, first + layer.num_features)
                first += layer.num_features
        self.start(at_least_float32(torch.cat(means)), at_least_float32(torch.cat(variances)), random)

    def start(self, mean: Tensor, variance: Tensor, random: Random) -> None:
        """Declare the memory, given the source statistics of all layers [channels]."""
        raise NotImplementedError


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

    def start(self, mean: Tensor, variance: Tensor, random: Random) -> None:
        """Scatter the components around the source statistics, which half of the variance explains."""
        shape, k = (self.components, len(mean)), self.components
        noise = torch.randn(shape, generator=random.generator, dtype=mean.dtype).to(mean.device)
        scatter = (0.5 * k / (k - 1) * variance).sqrt() * noise
        self.declare(means=mean + scatter, variances=(0.5 * variance).expand(shape).clone())
        self.change_in_place("means", "variances")

    def normalise(self, layer: _BatchNorm, forward: Forward, x: Tensor, control: NormControl) -> Tensor:
        """Normalise each sample, then move the components."""
        columns: slice = vars(layer)["norm_columns"]
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

    def start(self, mean: Tensor, variance: Tensor, random: Random) -> None:
        """Begin without averages."""
        self.declare(means=torch.zeros_like(mean), deviations=torch.zeros_like(variance))
        self.change_in_place("means", "deviations")

    def normalise(self, layer: _BatchNorm, forward: Forward, x: Tensor, control: NormControl) -> Tensor:
        """Renormalise the batch, then move the averages."""
        columns: slice = vars(layer)["norm_columns"]
        variance, mean = (s.to(self.means.dtype) for s in channel_statistics(x))
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
