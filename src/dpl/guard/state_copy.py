"""A copy of a state, and checks that a step left everything finite."""

from collections.abc import Callable, Iterable, Mapping
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from dpl.core.state import Stateful
from dpl.methods.base import Method
from dpl.methods.model_state import State, stays_on_host

__all__ = ["SavedState", "all_finite", "are_finite", "bounds", "bounds_after_step", "relative_change"]

_SMALL = 4096  # values of a tensor
_HUGE = 1e30  # the next sum or square overflows


def bounds_after_step(method: Method[Any], logits: Tensor) -> Tensor:
    """Return the bounds of logits, loss and every parameter that trains (a bad gradient shows in those)."""
    loss = method.facts.get("loss")
    values = [logits, *method.trainable.values()]
    return bounds([*values, loss] if isinstance(loss, Tensor) else values)


def all_finite(values: Iterable[Tensor]) -> bool:
    """Say whether all floating-point tensors are finite, and so small that sums of theirs are; the host waits once."""
    return are_finite(bounds(values).tolist())


def are_finite(bounds: Iterable[float]) -> bool:
    """Say whether values between these bounds, read on the host, are finite, and so small that sums of theirs are."""
    return all(abs(bound) <= _HUGE for bound in bounds)


@torch.no_grad()
def bounds(values: Iterable[Tensor]) -> Tensor:
    """Return the smallest and largest values of floating-point tensors, for `are_finite`; NaN is both."""
    floats = _joined([v for v in values if v.is_floating_point() and v.numel() > 0])
    found = [bound for value in floats for bound in torch.aminmax(value)]
    if not found:
        return torch.empty(0)
    kind, device = reduce(torch.promote_types, (bound.dtype for bound in found)), found[0].device
    return torch.stack([bound.to(device, kind) for bound in found])


def _joined(values: list[Tensor]) -> list[Tensor]:
    """Return small tensors as a few long ones: a call for each costs more than looking at what is in it."""
    groups: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for value in values:
        if value.numel() <= _SMALL:
            groups.setdefault((value.dtype, value.device), []).append(value.flatten())
    return [torch.cat(group) for group in groups.values()] + [value for value in values if value.numel() > _SMALL]


@torch.no_grad()
def relative_change(pairs: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Return |new - old| / |old| over all pairs taken together, on their device."""
    if not pairs:
        return torch.zeros(())
    new, old = [n.detach() for n, _ in pairs], [o for _, o in pairs]
    moved, size = (torch.stack(torch._foreach_norm(x)).norm() for x in (torch._foreach_sub(new, old), old))
    change: Tensor = moved / size.clamp(min=1e-12)
    return change


class SavedState(Stateful):
    """A copy of a state, or nothing."""

    def __init__(self) -> None:
        super().__init__()
        self._state: State = {}

    @property
    def exists(self) -> bool:
        """Say whether there is a copy."""
        return bool(self._state)

    def save(self, state: State) -> None:
        """Keep a copy of this state in place of the one before."""
        self._state = {key: value.clone() for key, value in state.items()}

    def clear(self) -> None:
        """Keep nothing."""
        self._state = {}

    def state(self) -> State:
        """Return a copy."""
        return {key: value.clone() for key, value in self._state.items()}

    def check(self, state: Mapping[str, Tensor]) -> None:
        """Accept any state: it is checked against the model when it is restored."""

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Keep a copy of `state`."""
        self._state = {key: value.clone() for key, value in state.items()}

    def move(self, transfer: Callable[[Tensor], Tensor]) -> None:
        """Move what lives on the model's device."""
        self._state = {k: v if stays_on_host(k) else transfer(v) for k, v in self._state.items()}
