"""A method's own source of random numbers: seeded, saved with its state, untouched by anybody else's draws."""

import torch
from torch import Tensor

__all__ = ["Random"]


class Random:
    """A generator on the network's device, shared by a method and its parts."""

    def __init__(self, seed: int, device: torch.device) -> None:
        self.seed = seed
        self.generator = torch.Generator(device).manual_seed(seed)

    def integers(self, high: int, count: int) -> Tensor:
        """Draw `count` whole numbers below `high`."""
        return torch.randint(high, (count,), generator=self.generator, device=self.generator.device)

    def fresh_seed(self) -> int:
        """Draw a seed for code that only knows the global generator (read it on the host: not for hot paths)."""
        return int(self.integers(2**31 - 1, 1))

    def follow(self, device: torch.device) -> None:
        """Continue on another device; a generator cannot be moved, so it starts anew there."""
        if self.generator.device != device:
            self.generator = torch.Generator(device).manual_seed(self.seed)
