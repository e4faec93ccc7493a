"""Random factors for a batch of images, and views whose draws are seeded by the caller."""

from collections.abc import Callable

import torch
from torch import Tensor

__all__ = ["Draw", "View", "seeded"]

View = Callable[[Tensor], Tensor]


def seeded(view: View, seed: int) -> View:
    """Return `view` with its draws fixed by `seed`; torch's global generators are as before when it returns.

    A method writes `seeded(self.augment, self.random.fresh_seed())(images)`: the seed comes from its own generator,
    so that views are repeatable, saved with the method's state, and nobody else's random numbers change.
    """

    def view_with_seed(images: Tensor) -> Tensor:
        kind = images.device.type
        if kind == "cpu" or not hasattr(torch, kind):  # a kind of device without a generator of its own
            with torch.random.fork_rng(devices=[]):
                torch.default_generator.manual_seed(seed)
                return view(images)
        # The built-in views draw on the host; a caller's own may draw on the device.
        with torch.random.fork_rng(devices=[images.device], device_type=kind):
            torch.default_generator.manual_seed(seed)
            torch.get_device_module(kind).manual_seed(seed)
            return view(images)

    return view_with_seed


class Draw:
    """Draws one factor for each image, or one for the whole batch, from torch's global generator on the host.

    The images may be on any device: the same seed gives the same view there.
    """

    def __init__(self, images: Tensor, *, per_sample: bool) -> None:
        self.count = len(images) if per_sample else 1
        self.device, self.dtype = images.device, images.dtype

    def uniform(self, low: float, high: float, times: int = 1) -> Tensor:
        """Return factors [B or 1, times, 1, 1] between `low` and `high`."""
        return low + (high - low) * self._sent(torch.rand(self.count, times, 1, 1, dtype=self.dtype))

    def chance(self, probability: float) -> Tensor:
        """Return coin tosses [B or 1, 1, 1, 1] that are true with `probability`."""
        return self._sent(torch.rand(self.count, 1, 1, 1)) < probability

    def noise(self, shape: torch.Size) -> Tensor:
        """Return standard normal numbers, one for each pixel."""
        return self._sent(torch.randn(shape, dtype=self.dtype))

    def _sent(self, numbers: Tensor) -> Tensor:
        return numbers.to(self.device, non_blocking=True)
