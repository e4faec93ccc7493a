"""BatchNorm statistics of a batch of which each process holds some rows."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from dpl.network.norm import (
    Batch,
    Blend,
    Forward,
    NormControl,
    Recall,
    Rule,
    Running,
    Track,
    channel_statistics,
    normalise,
)
from dpl.training.exchange import collect
from dpl.training.team import Team

__all__ = ["Pooled", "Rows", "pooled"]


@dataclass
class Rows:
    """How many rows the whole batch has; it may change on the way through the network."""

    team: Team
    count: int
    deciding: int | None = None
    """Only so many first rows of the batch define its statistics."""

    def own_deciding(self) -> list[int]:
        """Return how many rows of each process define the statistics."""
        sizes = self.team.sizes(self.count)
        limit = self.count if self.deciding is None else self.deciding
        return [min(size, max(0, limit - sum(sizes[:place]))) for place, size in enumerate(sizes)]


@dataclass(frozen=True)
class Pooled:
    """A rule on batch statistics, with those of the whole batch."""

    base: Batch | Blend | Track
    rows: Rows

    def __call__(self, layer: _BatchNorm, forward: Forward, x: Tensor, control: NormControl) -> Tensor:
        """Normalise one's own rows as the rule would normalise the whole batch."""
        counts = [rows * (x.numel() // max(len(x) * x.shape[1], 1)) for rows in self.rows.own_deciding()]
        if sum(counts) < 2 and layer.running_mean is not None:
            return Running()(layer, forward, x, control)
        mean, squares = self._moments(x[: self.rows.own_deciding()[self.rows.team.rank]], counts)
        if isinstance(self.base, Blend) and layer.running_mean is not None and layer.running_var is not None:
            variance = squares / (sum(counts) - self.base.correction)
            mean = torch.lerp(layer.running_mean, mean.to(layer.running_mean.dtype), self.base.share)
            variance = torch.lerp(layer.running_var, variance.to(layer.running_var.dtype), self.base.share)
        else:
            variance = squares / sum(counts)
            if isinstance(self.base, Track) and not (self.base.learning_only and not torch.is_grad_enabled()):
                _move(layer, mean.detach(), squares.detach() / (sum(counts) - 1))
        control.keep(layer, mean, variance)
        return normalise(layer, forward, x, mean, variance)

    def _moments(self, own: Tensor, counts: list[int]) -> tuple[Tensor, Tensor]:
        """Return the mean and the sum of squared deviations of each channel over the rows of all processes.

        Each process tells both for its own rows; pooled so, nothing is lost to cancellation.
        """
        reduced = [dim for dim in range(own.ndim) if dim != 1]
        if len(own):
            variance, mean = channel_statistics(own)
        else:
            mean = variance = own.sum(dim=reduced)  # zeros that keep their place in the backward pass
        means, variances = collect(torch.stack([mean, variance]), self.rows.team).unbind(dim=1)  # [processes, C]
        weights = means.new_tensor(counts)[:, None]
        total = (weights * means).sum(dim=0) / sum(counts)
        return total, (weights * (variances + (means - total) ** 2)).sum(dim=0)


@torch.no_grad()
def _move(layer: _BatchNorm, mean: Tensor, variance: Tensor) -> None:
    """Move the running statistics as the layer itself would in training."""
    if layer.running_mean is None or layer.running_var is None or layer.num_batches_tracked is None:
        return
    layer.num_batches_tracked += 1
    share = 1 / float(layer.num_batches_tracked) if layer.momentum is None else layer.momentum
    layer.running_mean.lerp_(mean.to(layer.running_mean.dtype), share)
    layer.running_var.lerp_(variance.to(layer.running_var.dtype), share)


def pooled(rule: Rule, rows: Rows) -> Rule | None:
    """Return the rule for a parted batch; None for one that has to see the whole batch."""
    if isinstance(rule, (Running, Recall)):  # statistics that do not come from the batch at hand
        return rule
    return Pooled(rule, rows) if isinstance(rule, (Batch, Blend, Track)) else None
