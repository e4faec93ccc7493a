"""Training in the processes that `torchrun` starts: each holds some rows of every batch.

Gradients and BatchNorm statistics are those of the whole batch, so that the result is the network that one process
would train. (torch's SyncBatchNorm works on GPUs only.)
"""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.nn.functional import all_reduce
from torch.nn.modules.batchnorm import _BatchNorm

from dpl.core.extras import choose_device
from dpl.network.norm_control import Forward, NormControl, install, normalise

__all__ = ["ALONE", "ProcessGroup", "process_group"]


@dataclass(frozen=True)
class ProcessGroup:
    """The position of this process among all, and its device. All processes must call a method that communicates."""

    rank: int = 0
    size: int = 1
    device: torch.device = torch.device("cpu")

    def rows(self, count: int) -> slice:
        """Return the rows of this process, of `count` rows in all."""
        return slice(self.rank * count // self.size, (self.rank + 1) * count // self.size)

    def sum(self, own: Tensor) -> Tensor:
        """Return the sum over all processes, differentiable."""
        return own if self.size == 1 else all_reduce(own.contiguous())  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        """Return when all processes are here."""
        if self.size > 1:
            dist.barrier()

    def sum_gradients(self, network: nn.Module) -> None:
        """Replace the gradients by their sums over all processes."""
        if self.size > 1:
            own = [parameter.grad for parameter in network.parameters() if parameter.grad is not None]
            whole = torch.cat([gradient.flatten() for gradient in own])  # one message is faster than many
            dist.all_reduce(whole)
            for gradient, part in zip(own, torch.split(whole, [gradient.numel() for gradient in own]), strict=True):
                gradient.copy_(part.view_as(gradient))

    def join_statistics(self, network: nn.Module) -> None:
        """Let BatchNorm layers in training use the statistics of the whole batch."""
        if self.size > 1:
            install(network).rule = self._normalise

    def _normalise(self, layer: _BatchNorm, forward: Forward, x: Tensor, control: NormControl) -> Tensor:
        """Normalise the rows of this process as the layer would normalise the whole batch."""
        if not layer.training:
            return forward(x)
        others = [dim for dim in range(x.ndim) if dim != 1]
        count = self.sum(x.new_tensor(x.numel() // x.shape[1], dtype=torch.float64))
        mean = self.sum(x.sum(others)) / count
        centred = x - mean.view(-1, *[1] * (x.ndim - 2))  # two sums, because one of squares would lose precision
        variance = self.sum((centred**2).sum(others)) / count
        if layer.running_mean is not None and layer.running_var is not None and layer.num_batches_tracked is not None:
            layer.num_batches_tracked += 1
            share = 1 / float(layer.num_batches_tracked) if layer.momentum is None else layer.momentum
            with torch.no_grad():
                layer.running_mean.lerp_(mean.to(layer.running_mean.dtype), share)
                layer.running_var.lerp_((variance * count / (count - 1)).to(layer.running_var.dtype), share)
        return normalise(layer, forward, x, mean, variance)


ALONE = ProcessGroup()


@contextmanager
def process_group(device: str | None = None) -> Iterator[ProcessGroup]:
    """Join the processes that `torchrun` started: by NCCL, each on the GPU of its local rank, or by gloo on CPUs."""
    if int(os.environ.get("WORLD_SIZE", "1")) < 2:
        yield ProcessGroup(device=choose_device(device))
        return
    on_gpu = torch.cuda.is_available() if device is None else device.startswith("cuda")
    if on_gpu:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    dist.init_process_group("nccl" if on_gpu else "gloo")
    try:
        group = ProcessGroup(dist.get_rank(), dist.get_world_size(), choose_device(device))
        yield group
        group.wait()
        # A thread of gloo that still has to release a tensor needs Python's lock, which the end of the group holds
        # while it waits for that thread.
        time.sleep(0.5)
    finally:
        dist.destroy_process_group()
