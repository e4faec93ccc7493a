"""The processes that work together: who they are, and what they tell each other."""

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dpl.core.errors import SettingError

__all__ = ["Team", "started"]


@dataclass(frozen=True)
class Team:
    """This process's place among those that `torchrun` started; every method is to be called by all of them."""

    rank: int
    size: int

    @classmethod
    def current(cls) -> "Team":
        """Return the team of this process."""
        if not (dist.is_available() and dist.is_initialized()):
            raise SettingError(
                "no process group: start the program with torchrun and put the work inside `with started():`, or call "
                "torch.distributed.init_process_group first"
            )
        return cls(dist.get_rank(), dist.get_world_size())

    def __deepcopy__(self, _memo: object) -> "Team":
        return self

    def sizes(self, count: int) -> list[int]:
        """Return how many of `count` rows each member takes."""
        return [count // self.size + (place < count % self.size) for place in range(self.size)]

    def rows(self, count: int) -> slice:
        """Return which of `count` rows this member takes."""
        sizes = self.sizes(count)
        start = sum(sizes[: self.rank])
        return slice(start, start + sizes[self.rank])

    def join(self, own: Tensor, sizes: list[int]) -> Tensor:
        """Return the rows of all members, one after the other; member i has `sizes[i]` of them."""
        padded = own.new_zeros((max(sizes), *own.shape[1:]))
        padded[: len(own)] = own
        parts = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(parts, padded)
        return _laid_out(torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)]), own)

    def add(self, own: Tensor) -> Tensor:
        """Return the sum over all members."""
        total = own.detach().clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total)
        return total

    def hear(self, value: Any = None) -> Any:
        """Return what the first member says: plain data."""
        text = json.dumps(value).encode() if self.rank == 0 else b""
        size = self._heard(torch.tensor([len(text)]))
        letters = torch.frombuffer(bytearray(text), dtype=torch.uint8) if text else torch.empty(int(size)).byte()
        return json.loads(bytes(self._heard(letters).tolist()))

    def hear_tensors(self, tensors: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
        """Return the first member's tensors, on the CPU."""
        own = {} if tensors is None else dict(tensors)
        outline = {name: (list(value.shape), str(value.dtype)) for name, value in own.items()}
        heard = {}
        for name, (shape, dtype) in self.hear(outline).items():
            empty = torch.empty(shape, dtype=getattr(torch, dtype.removeprefix("torch.")))
            heard[name] = self._heard(own[name] if self.rank == 0 else empty).cpu()
        return heard

    def wait(self) -> None:
        """Wait for all members."""
        dist.barrier()

    def _heard(self, value: Tensor) -> Tensor:
        sent = value.contiguous().to(self._device)
        dist.broadcast(sent, src=0)
        return sent

    @property
    def _device(self) -> torch.device:
        return torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")


def _laid_out(joined: Tensor, own: Tensor) -> Tensor:
    """Return the rows in the memory layout of one's own: convolutions are faster in the one their images came in."""
    last = own.ndim == 4 and own.is_contiguous(memory_format=torch.channels_last) and not own.is_contiguous()
    return joined.contiguous(memory_format=torch.channels_last) if last else joined


@contextmanager
def started(device: str | None = None) -> Iterator[Team | None]:
    """Join the processes that `torchrun` started, or yield None where it was not used; one process alone is no team.

    On GPUs each process takes the one of its number, and NCCL carries what they tell each other; else gloo does.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) < 2:
        yield None
        return
    if dist.is_initialized():
        yield Team.current()
        return
    on_gpu = torch.cuda.is_available() if device is None else device.startswith("cuda")
    if on_gpu:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    dist.init_process_group("nccl" if on_gpu else "gloo")
    try:
        yield Team.current()
    finally:
        dist.destroy_process_group()
