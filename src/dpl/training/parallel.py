"""A network that learns in several processes: DistributedDataParallel, with BatchNorm statistics of the whole batch."""

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from dpl.network.norm import Running, Track, install
from dpl.network.split import logits_of
from dpl.training.norm import Pooled, Rows
from dpl.training.team import Team

__all__ = ["Parallel"]


class Parallel:
    """Runs one process's rows of each batch; gradients become those of the mean loss over the whole batch."""

    def __init__(self, network: nn.Module, team: Team) -> None:
        self.team, self.network = team, network
        self._rows = Rows(team, 0)
        self._norm = install(network)
        on_gpu = next(network.parameters()).is_cuda
        self._wrapped = DistributedDataParallel(
            network,
            device_ids=[torch.cuda.current_device()] if on_gpu else None,
            static_graph=True,  # allows for parameters that the network does not use
        )

    def __call__(self, images: Tensor) -> tuple[Tensor, float]:
        """Return the logits of one's own rows, and what their mean loss is to be multiplied by.

        Gradients are averaged over processes, which may hold different numbers of rows.
        """
        counts = self.team.join(torch.tensor([len(images)], device=images.device), [1] * self.team.size)
        self._rows.count = int(counts.sum())
        with self._norm.using(Pooled(Track(), self._rows)):
            logits = logits_of(self._wrapped(images))
        return logits, self.team.size * len(images) / self._rows.count

    def predict(self, images: Tensor) -> Tensor:
        """Run the network as in evaluation."""
        with self._norm.using(Running()):
            return logits_of(self.network(images))
