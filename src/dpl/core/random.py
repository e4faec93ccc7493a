"""A method's own source of random numbers: seeded, saved with its state, untouched by anybody else's draws."""

import torch
from torch import Tensor

__all__ = ["Random"]


class Random:
    """A generator on the host: a seed gives the same numbers on every device, and a state travels between them."""

    def __init__(self, seed: int, device: torch.device) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.device = device

    def integers(self, high: int, count: int) -> Tensor:
        """Draw `count` whole numbers below `high`."""
        return torch.randint(high, (count,), generator=self.generator).to(self.device, non_blocking=True)

    def uniform(self, count: int) -> Tensor:
        """Draw `count` numbers from 0 to 1, without 1."""
        return torch.rand(count, generator=self.generator).to(self.device, non_blocking=True)

    def permutation(self, count: int) -> Tensor:
        """Draw an order of `count` things."""
        return torch.randperm(count, generator=self.generator).to(self.device, non_blocking=True)

    def fresh_seed(self) -> int:
        """Draw a seed for code that only knows the global generator."""
        return int(torch.randint(2**31 - 1, (1,), generator=self.generator))
