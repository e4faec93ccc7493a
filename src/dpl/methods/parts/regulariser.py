"""The regulariser of Eq. 6, of all classes, or of a random sample where all C² similarities would cost too much."""

from torch import Tensor

from dpl.core.random import Random
from dpl.methods.base import Fact, Objective
from dpl.objectives import prototype_regularization

__all__ = ["regularised"]

# Above this many classes Eq. 6 is estimated from a sample: all similarities would cost more than the network.
_ALL_CLASSES, _SAMPLED_CLASSES = 4096, 64


def regularised(
    contrast: Tensor, prototypes: Tensor, memory: Tensor, temperature: float, weight: float, random: Random
) -> Objective:
    """Return Eq. 7: the contrast, plus the weighted regulariser that holds each prototype near its memory (Eq. 6)."""
    classes = len(prototypes)
    sampled = None if classes <= _ALL_CLASSES else random.integers(classes, _SAMPLED_CLASSES)
    regulariser = prototype_regularization(prototypes, memory, temperature, sampled)
    facts: dict[str, Fact] = {"contrast": contrast.detach(), "regulariser": regulariser.detach()}
    return Objective(contrast + weight * regulariser, facts=facts)
