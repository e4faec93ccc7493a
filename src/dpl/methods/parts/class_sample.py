"""Which classes Eq. 6 is computed for: all, or a random sample where all C² similarities would cost too much."""

from torch import Tensor

from dpl.core.random import Random

__all__ = ["sampled_classes"]

# Above this many classes Eq. 6 is estimated from a sample: all similarities would cost more than the network.
_ALL_CLASSES, _SAMPLED_CLASSES = 4096, 64


def sampled_classes(classes: int, random: Random) -> Tensor | None:
    """Return the rows of Eq. 6 to compute; None: all."""
    return None if classes <= _ALL_CLASSES else random.integers(classes, _SAMPLED_CLASSES)
