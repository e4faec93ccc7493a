"""What a stream has learned, as its difference from the source: only the tensors whose bits are others."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

__all__ = ["Delta", "SourceState"]


@dataclass(frozen=True)
class Delta:
    """Tensors that differ from the source state or are not in it, and names that are in it alone."""

    changed: Mapping[str, Tensor] = field(default_factory=dict)
    removed: tuple[str, ...] = ()

    @property
    def size(self) -> int:
        """Bytes of all tensors."""
        return sum(value.numel() * value.element_size() for value in self.changed.values())


class SourceState:
    """The state that every stream starts from, shared by all and never changed."""

    def __init__(self, state: Mapping[str, Tensor]) -> None:
        self._state = dict(state)
        self._norm = math.sqrt(sum(_energy(value) for key, value in state.items() if _is_weight(key, value)))

    def difference(self, state: Mapping[str, Tensor]) -> Delta:
        """Return what is needed beside the source state to make `state` again, to the bit; tensors on the CPU."""
        changed = {
            key: value.detach().cpu()
            for key, value in state.items()
            if key not in self._state or not same_bits(value, self._state[key])
        }
        return Delta(changed, tuple(sorted(set(self._state) - set(state))))

    def restored(self, delta: Delta) -> dict[str, Tensor]:
        """Return the state of which `delta` was taken."""
        gone = set(delta.removed)
        return {key: value for key, value in (self._state | dict(delta.changed)).items() if key not in gone}

    def drift(self, delta: Delta) -> float:
        """Return how far the network's weights have moved, relative to their own size."""
        moved = 0.0
        for key, value in delta.changed.items():
            if key in self._state and _is_weight(key, value):
                moved += _energy(value.float() - self._state[key].cpu().float())
        return math.sqrt(moved) / self._norm if self._norm else 0.0


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Compare bits, not values: 0.0 and -0.0 are equal numbers and lead to different streams."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    first, second = (value.detach().contiguous().reshape(-1).view(torch.uint8) for value in (one, other))
    return torch.equal(first, second.to(first.device))


def _is_weight(key: str, value: Tensor) -> bool:
    return key.startswith("model.") and value.is_floating_point()


def _energy(value: Tensor) -> float:
    return float(value.double().square().sum())
