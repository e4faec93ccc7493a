"""ActMAD: match the statistics of activations to those of the source, place by place.

Mirza et al., ActMAD: Activation Matching to Align Distributions for Test-Time-Training, CVPR 2023. For the output of
each BatchNorm layer l, mean mu and unbiased variance v over the images of a batch at every channel and place:

    L = 1/2 sum_l mean |mu_l - mu_l^s| + 1/2 sum_l mean |v_l - v_l^s|

with mu^s and v^s the averages over source batches of the same statistics. Updates: all parameters, with running
statistics. Needs: BatchNorm layers, images of one size, and source batches once (labels are not used). Output: from
after the update, by a second pass. The authors use a learning rate of 1e-2 for CIFAR-10, 1e-3 for CIFAR-100 and 2.5e-4
for ImageNet, with batches of 128.
Departures from the authors' code: they report the lowest error over all steps on the whole test set, not that of the
stream; the images are not cropped and mirrored at random; activations are those before a ReLU, also where it works in
place (theirs are then overwritten); source batches of one image are left out (theirs give NaN).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from dpl.core.errors import InputError, ModelError, SettingError
from dpl.core.numerics import variance_and_mean
from dpl.core.settings import setting
from dpl.methods.base import GradientMethod, Objective, Source
from dpl.methods.parts.source_data import first_batches
from dpl.methods.registry import register
from dpl.methods.settings import GradientSettings
from dpl.network import Network

__all__ = ["ActMAD", "ActMADSettings"]

Statistics = list[tuple[Tensor, Tensor]]  # variance and mean of each layer, flat


@dataclass(frozen=True, kw_only=True)
class ActMADSettings(GradientSettings, scope="all", optimizer="nesterov", weight_decay=5e-4, output="after"):
    """Settings of ActMAD."""

    source_samples: int = setting(100_000, "source images after which their statistics are ready", low=2)


@register(
    "actmad",
    paper="Mirza et al., ActMAD: Activation Matching to Align Distributions for Test-Time-Training, CVPR 2023",
    updates="all parameters",
    passes="2 forward, 1 backward",
    needs_norm=True,
    source="once",
    min_batch=2,
)
class ActMAD(GradientMethod[ActMADSettings]):
    """Activation matching."""

    settings_class = ActMADSettings
    source_mean: Tensor | None  # mu^s of all layers, flat
    source_variance: Tensor | None  # v^s

    def __init__(self, network: Network, settings: ActMADSettings) -> None:
        super().__init__(network, settings)
        self.layers = [layer for layer in network.module.modules() if isinstance(layer, _BatchNorm)]
        if not self.layers:
            raise ModelError("'actmad' matches the outputs of BatchNorm layers and this network has none; try 'tent'")
        self.declare(source_mean=None, source_variance=None)

    @torch.no_grad()
    def prepare(self, source: Source | None) -> None:
        """Average the statistics of source batches."""
        batches, found = self.require_source(source, relative="tent"), list[tuple[Tensor, Tensor]]()
        for images, _ in first_batches(batches, self.network, self.settings.source_samples):
            if len(images) > 1:
                with self._watching() as statistics:
                    self.network(images)
                found.append(_flat(statistics))
        if not found:
            raise SettingError("source gave no batch of at least two images; their variance is needed")
        variances, means = zip(*found, strict=True)
        self.source_variance, self.source_mean = torch.stack(variances).mean(dim=0), torch.stack(means).mean(dim=0)

    def step(self, images: Tensor) -> Tensor:
        """Match, then predict."""
        for _ in range(self.settings.steps):
            with torch.enable_grad():
                with self._watching() as statistics:
                    out = self.network(images)
                self.update(Objective(self._distance(statistics)), out)
        return self.answer(images, out.whole)

    def _distance(self, statistics: Statistics) -> Tensor:
        """L."""
        if self.source_mean is None or self.source_variance is None:
            raise SettingError("'actmad' has no source statistics; pass source=")
        sizes = [mean.numel() for _, mean in statistics]
        variance, mean = _flat(statistics)
        if mean.shape != self.source_mean.shape:
            raise InputError("images have another size than the source images, and places are compared; resize them")
        gaps = (mean - self.source_mean).abs(), (variance - self.source_variance).abs()
        return 0.5 * torch.stack([part.mean() for gap in gaps for part in torch.split(gap, sizes)]).sum()

    @contextmanager
    def _watching(self) -> Iterator[Statistics]:
        """Collect the statistics of every BatchNorm layer's output inside the block."""
        found: Statistics = []

        def watch(_layer: Any, _inputs: Any, output: Tensor) -> Tensor:
            variance, mean = variance_and_mean(output, [0], correction=1)
            found.append((variance.flatten(), mean.flatten()))
            return output.clone()  # what follows may work in place; the gradient needs the output as it is

        handles = [layer.register_forward_hook(watch) for layer in self.layers]
        try:
            yield found
        finally:
            for handle in handles:
                handle.remove()


def _flat(statistics: Statistics) -> tuple[Tensor, Tensor]:
    variances, means = zip(*statistics, strict=True)
    return torch.cat(variances), torch.cat(means)
