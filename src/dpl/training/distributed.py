"""Training in the processes that `torchrun` starts: each holds some rows of every batch.

DistributedDataParallel averages gradients over the processes. BatchNorm uses the statistics of the whole batch, so that
the result is the network that one process would train.
"""

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel

from dpl.network.norm import Forward, NormControl, RunningStatistics, channel_statistics, install, normalise
from dpl.network.split import logits_of

__all__ = ["DistributedNetwork", "ProcessGroup", "process_group"]


@contextmanager
def process_group(device: str | None = None) -> Iterator["ProcessGroup | None"]:
    """Join the processes that `torchrun` started; yield None for a single process.

    On GPUs, each process uses the GPU with its local rank and NCCL; on CPUs, they use gloo.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) < 2:
        yield None
        return
    on_gpu = torch.cuda.is_available() if device is None else device.startswith("cuda")
    if on_gpu:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    dist.init_process_group("nccl" if on_gpu else "gloo")
    try:
        yield ProcessGroup(dist.get_rank(), dist.get_world_size())
    finally:
        dist.destroy_process_group()


@dataclass(frozen=True)
class ProcessGroup:
    """The position of this process among all. All processes must call a method that communicates."""

    rank: int
    size: int

    def rows(self, count: int) -> slice:
        """Return the rows of this process, of `count` rows in all."""
        share, remainder = divmod(count, self.size)
        start = self.rank * share + min(self.rank, remainder)
        return slice(start, start + share + (self.rank < remainder))

    def gather(self, own: Tensor) -> Tensor:
        """Return the tensors of all processes, which have one shape, as [processes, ...]."""
        parts = [torch.empty_like(own) for _ in range(self.size)]
        dist.all_gather(parts, own.contiguous())
        return torch.stack(parts)

    def sum(self, own: Tensor) -> Tensor:
        """Return the sum over all processes."""
        total = own.detach().clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total)
        return total

    def broadcast(self, value: Any = None) -> Any:
        """Return the value of the first process: JSON data."""
        text = json.dumps(value).encode() if self.rank == 0 else b""
        size = self._broadcast(torch.tensor([len(text)]))
        letters = torch.frombuffer(bytearray(text), dtype=torch.uint8) if text else torch.empty(int(size)).byte()
        return json.loads(bytes(self._broadcast(letters).tolist()))

    def broadcast_tensors(self, tensors: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
        """Return the tensors of the first process, on the CPU."""
        own = {} if tensors is None else dict(tensors)
        outline = {name: (list(value.shape), str(value.dtype)) for name, value in own.items()}
        received = {}
        for name, (shape, dtype) in self.broadcast(outline).items():
            empty = torch.empty(shape, dtype=getattr(torch, dtype.removeprefix("torch.")))
            received[name] = self._broadcast(own[name] if self.rank == 0 else empty).cpu()
        return received

    def _broadcast(self, value: Tensor) -> Tensor:
        sent = value.contiguous().to("cuda" if dist.get_backend() == "nccl" else "cpu")
        dist.broadcast(sent, src=0)
        return sent


class DistributedNetwork:
    """Runs the rows of one process; gradients become those of the mean loss over the whole batch."""

    def __init__(self, network: nn.Module, group: ProcessGroup) -> None:
        self.group = group
        self._norm = install(network)
        on_gpu = next(network.parameters()).is_cuda
        self._wrapped = DistributedDataParallel(
            network,
            device_ids=[torch.cuda.current_device()] if on_gpu else None,
            static_graph=True,  # allows parameters that the network does not use
        )

    def __call__(self, images: Tensor) -> tuple[Tensor, float]:
        """Return the logits of the rows of this process, and a factor for their mean loss.

        The processes may hold different numbers of rows, but their gradients are averaged with equal weights.
        """
        counts = self.group.gather(torch.tensor(len(images), device=images.device)).tolist()
        with self._norm.using(GlobalBatchStatistics(self.group, counts)):
            logits = logits_of(self._wrapped(images))
        return logits, self.group.size * len(images) / sum(counts)


@dataclass(frozen=True)
class GlobalBatchStatistics:
    """A BatchNorm rule: statistics of the whole batch, which also update the running ones."""

    group: ProcessGroup
    rows: list[int]  # of each process

    def __call__(self, layer: _BatchNorm, forward: Forward, x: Tensor, control: NormControl) -> Tensor:
        """Normalise the rows of this process as the layer would normalise the whole batch in training."""
        per_row = x.numel() // max(len(x) * x.shape[1], 1)
        counts = [rows * per_row for rows in self.rows]
        if sum(counts) < 2 and layer.running_mean is not None:
            return RunningStatistics()(layer, forward, x, control)
        mean, squares = self._moments(x, counts)
        _update_running(layer, mean.detach(), squares.detach() / (sum(counts) - 1))
        return normalise(layer, forward, x, mean, squares / sum(counts))

    def _moments(self, own: Tensor, counts: list[int]) -> tuple[Tensor, Tensor]:
        """Return the mean and the sum of squared deviations of each channel over the rows of all processes.

        Every process contributes the moments of its own rows, so that no precision is lost to cancellation.
        """
        variance, mean = channel_statistics(own)
        stacked = _Gather.apply(torch.stack([mean, variance]), self.group)  # type: ignore[no-untyped-call]
        means, variances = stacked.unbind(dim=1)  # [processes, C]
        weights = means.new_tensor(counts)[:, None]
        total = (weights * means).sum(dim=0) / sum(counts)
        return total, (weights * (variances + (means - total) ** 2)).sum(dim=0)


class _Gather(torch.autograd.Function):
    """`ProcessGroup.gather` with a gradient: the one of each process's tensor, summed over all processes."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return group.gather(own)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.group.sum(gradient)[ctx.group.rank], None


@torch.no_grad()
def _update_running(layer: _BatchNorm, mean: Tensor, variance: Tensor) -> None:
    """Update the running statistics as the layer itself does in training."""
    if layer.running_mean is None or layer.running_var is None or layer.num_batches_tracked is None:
        return
    layer.num_batches_tracked += 1
    share = 1 / float(layer.num_batches_tracked) if layer.momentum is None else layer.momentum
    layer.running_mean.lerp_(mean.to(layer.running_mean.dtype), share)
    layer.running_var.lerp_(variance.to(layer.running_var.dtype), share)
