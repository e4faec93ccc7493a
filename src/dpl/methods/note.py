"""NOTE: normalise each image by itself where it is unusual, and learn from a reservoir balanced over predictions.

Gong et al., NOTE: Robust Continual Test-time Adaptation Against Temporal Correlation, NeurIPS 2022. A BatchNorm layer
with statistics mu, v uses for an instance with own statistics m, u over L places

    mu' = mu + shrink(m - mu, k sqrt(v / L)),    v' = max(0, v + shrink(u - v, k v sqrt(2 / (L - 1))))

where shrink(x, t) = sign(x) max(|x| - t, 0): what sampling noise explains is ignored. Every image is offered to a
class-balanced reservoir (dpl.memory.bank); after every N images the mean entropy of its samples is minimised with
statistics mu, v of the samples, towards which the running ones move by 0.01.

Updates: affine parameters of normalisation layers, and running statistics. Needs: BatchNorm layers; the authors
train the source with these layers too (`k=1e9` gives a network trained otherwise plain ones). Output: from before the
updates, with running statistics, so that no image's prediction depends on its batch.
Departures from the authors' code: all images of a batch are predicted before any update; the entropy is not divided by
the number of classes and has no 1e-6 inside its logarithm, which `authors=True` undoes (Adam hardly sees the factor
unless there is weight decay: their CIFAR runs have 5e-4, because a 0 on the command line is ignored).
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from dpl.core.errors import SettingError
from dpl.core.numerics import at_least_float32, variance_and_mean
from dpl.core.settings import setting
from dpl.methods.base import Objective
from dpl.methods.parts.banked import MemoryBankSettings, ReservoirMethod
from dpl.methods.registry import register
from dpl.network import Network
from dpl.network.norm_control import Forward, NormControl, channel_statistics, normalise_each
from dpl.objectives import entropy, entropy_of_probabilities

__all__ = ["NOTE", "InstanceAware", "NOTESettings"]


@dataclass(frozen=True, kw_only=True)
class NOTESettings(MemoryBankSettings, lr=1e-4):
    """Settings of NOTE."""

    k: float = setting(4.0, "instances deviate by more than k standard errors to be normalised by themselves", low=0)
    bn_momentum: float = setting(
        0.01,
        "share of the bank's statistics in the running ones at an update",
        low=0,
        high=1,
        formerly="statistics",
    )
    authors: bool = setting(False, "divide the entropy by the number of classes; 1e-6 in its logarithm", later=True)


@dataclass(frozen=True)
class InstanceAware:
    """The rule of the equations above, around running statistics or, with `move`, the batch's."""

    k: float
    move: float | None = None  # by how much the running statistics follow the batch's

    def __call__(self, layer: _BatchNorm, forward: Forward, x: Tensor, control: NormControl) -> Tensor:
        """Normalise each instance."""
        mean, variance = (s.view(1, -1, *[1] * (x.ndim - 2)) for s in self._statistics(layer, x))
        places = x[0, 0].numel()
        if places > 1:
            own_variance, own_mean = variance_and_mean(x, range(2, x.ndim), correction=1)
            noise = variance + layer.eps
            mean = mean + _shrink(own_mean - mean, self.k * (noise / places).sqrt())
            variance = variance + _shrink(own_variance - variance, self.k * noise * (2 / (places - 1)) ** 0.5)
        each = (len(x), x.shape[1])
        mean, variance = (s.expand(*each, *s.shape[2:]).reshape(each) for s in (mean, variance.clamp(min=0)))
        return normalise_each(layer, forward, x, mean, variance)

    def _statistics(self, layer: _BatchNorm, x: Tensor) -> tuple[Tensor, Tensor]:
        running_mean, running_var = layer.running_mean, layer.running_var
        if running_mean is None or running_var is None:
            return channel_statistics(x, correction=1)
        if self.move is None or x.numel() // x.shape[1] < 2:
            return running_mean, running_var
        mean, variance = channel_statistics(x, correction=1)
        running_mean.lerp_(mean.detach().to(running_mean.dtype), self.move)
        running_var.lerp_(variance.detach().to(running_var.dtype), self.move)
        return mean, variance


@register(
    "note",
    paper="Gong et al., NOTE: Robust Continual Test-time Adaptation Against Temporal Correlation, NeurIPS 2022",
    updates="affine parameters and running statistics of normalisation layers",
    passes="1 forward; every 64 images 1 forward and 1 backward over 64",
    needs_norm=True,
    host_reads=2,
)
class NOTE(ReservoirMethod[NOTESettings]):
    """Instance-aware normalisation and a balanced reservoir."""

    settings_class = NOTESettings
    no_export = "it normalises each image by its own statistics"

    def __init__(self, network: Network, settings: NOTESettings) -> None:
        super().__init__(network, settings)
        if settings.norm != "running":
            raise SettingError(f"norm={settings.norm!r}: NOTE has a rule of its own around 'running'; k= tunes it")
        network.norm.rule = InstanceAware(settings.k)

    def choose(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Offer samples to the reservoir by their predicted class."""
        draws = torch.rand(len(logits), 3, generator=self.random.generator)
        return self.offer(logits.argmax(dim=1), draws, logits.shape[1])

    def learn(self) -> None:
        """Minimise the entropy of the bank's samples, and let the running statistics follow theirs."""
        samples = self.stored(self.occupied())
        for _ in range(self.settings.steps):
            with (
                torch.enable_grad(),
                self.network.norm.using(InstanceAware(self.settings.k, self.settings.bn_momentum)),
            ):
                out = self.network(samples)
                self.update(Objective(self._entropy(out.logits)), out)

    def _entropy(self, logits: Tensor) -> Tensor:
        if self.settings.authors:
            return entropy_of_probabilities(at_least_float32(logits).softmax(dim=1), 1e-6).mean() / logits.shape[1]
        return entropy(logits).mean()


def _shrink(x: Tensor, threshold: Tensor) -> Tensor:
    return x.sign() * (x.abs() - threshold).clamp(min=0)
