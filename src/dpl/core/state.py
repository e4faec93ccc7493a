"""Declared state: what a method carries from batch to batch, named once and never forgotten.

Reset, snapshot, rollback and moves between devices walk the declarations, so a method cannot leave anything behind.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from typing import ClassVar

import torch
from torch import Tensor, nn

from dpl.core.errors import SnapshotError

__all__ = ["Stateful", "move_module", "part_of", "undo_changes"]

Value = Tensor | int | float | None


class Stateful:
    """An object whose changing attributes are declared by name."""

    on_host: ClassVar[bool] = False  # whether its own tensors stay on the CPU when the model moves

    def __init__(self) -> None:
        self._values: dict[str, bool] = {}  # by name, whether it may be unset
        self._in_place: set[str] = set()
        self._modules_: dict[str, nn.Module] = {}
        self._parts: dict[str, Stateful] = {}

    def declare(self, **values: Value) -> None:
        """Declare attributes with their first values: tensors (of any later shape), counters, or None for unset."""
        self._values |= {name: value is None for name, value in values.items()}
        vars(self).update(values)

    def change_in_place(self, *names: str) -> None:
        """Say that the method changes these declared tensors in place, so that a failed call can undo it."""
        self._in_place |= set(names)

    def declare_module(self, name: str, module: nn.Module) -> None:
        """Declare a network of the method's own (a teacher, a projector) as the attribute `name`."""
        self._modules_[name] = module
        setattr(self, name, module)

    def declare_part(self, name: str, part: "Stateful") -> None:
        """Declare an object that has declarations of its own as the attribute `name`."""
        self._parts[name] = part
        setattr(self, name, part)

    def parts(self) -> dict[str, "Stateful"]:
        """Return the declared parts by name."""
        return dict(self._parts)

    def everyone(self) -> list["Stateful"]:
        """Return this object and all its parts."""
        return [self, *(owner for part in self._parts.values() for owner in part.everyone())]

    def declared(self) -> list[tuple[dict[str, Value], str]]:
        """Return where the declared values are: dictionary and key."""
        return [(vars(owner), name) for owner in self.everyone() for name in owner._values]

    def state(self) -> dict[str, Tensor]:
        """Return a copy of everything declared; values that are None are left out."""
        state: dict[str, Tensor] = {}
        for name in self._values:
            value = getattr(self, name)
            if value is not None:
                exact = torch.float64 if isinstance(value, float) else None  # no digit may be lost
                state[name] = torch.as_tensor(value, dtype=exact).detach().clone()
        for name, module in self._modules_.items():
            state |= {f"{name}.{key}": value.detach().clone() for key, value in module.state_dict().items()}
        for name, part in self._parts.items():
            state |= {f"{name}.{key}": value for key, value in part.state().items()}
        return state

    def check(self, state: Mapping[str, Tensor]) -> None:
        """Raise if `state` does not fit the declarations; changes nothing."""
        for name, optional in self._values.items():
            if name in state:
                _check_value(name, getattr(self, name), state[name])
            elif not optional:
                raise SnapshotError(f"state {name!r} is missing; this is not a state of {type(self).__name__}")
        for name, module in self._modules_.items():
            if part_of(state, name).keys() != module.state_dict().keys():
                raise SnapshotError(f"state of {name!r} has other parameters than {type(self).__name__} expects")
        for name, part in self._parts.items():
            part.check(part_of(state, name))
        below = tuple(f"{name}." for name in self._modules_ | self._parts)
        unknown = sorted(key for key in state if key not in self._values and not key.startswith(below))
        if unknown:
            raise SnapshotError(f"unknown state {unknown[:4]} for {type(self).__name__}")

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Set everything declared to a copy of `state` (checked before)."""
        for name in self._values:
            value, is_number = state.get(name), isinstance(getattr(self, name), int | float)
            setattr(self, name, None if value is None else value.item() if is_number else value.detach().clone())
        for name, module in self._modules_.items():
            module.load_state_dict(part_of(state, name))
        for name, part in self._parts.items():
            part.restore(part_of(state, name))

    def keep(self) -> Callable[[], None] | None:
        """Return a function that undoes what this object changes in place from now on; None if it never does.

        A failed call puts back declared values, which are replaced and not changed. Only an object that changes a
        declared tensor or module in place has more to undo.
        """
        tensors = [value for name in self._in_place if isinstance(value := getattr(self, name), Tensor)]
        for module in self._modules_.values():
            tensors += module.state_dict(keep_vars=True).values()
        return undo_changes(tensors) if tensors else None

    @property
    def works_in_place(self) -> bool:
        """Whether `keep` may have something to undo."""
        return bool(self._in_place or self._modules_) or type(self).keep is not Stateful.keep

    def remember(self) -> Callable[[], None]:
        """Return a function that puts back every attribute of this object and its parts, declared or not.

        Containers are copied. Tensors are not: for an object that replaces them and never changes them in place.
        """
        owners, containers = [vars(owner) for owner in self.everyone()], (dict, list, set, deque)
        kept = [{k: copy(v) if isinstance(v, containers) else v for k, v in held.items()} for held in owners]

        def put_back() -> None:
            for held, values in zip(owners, kept, strict=True):
                held.clear()
                held.update(values)

        return put_back

    def counters(self) -> set[str]:
        """Return the names of the declared values that stay on the host: plain numbers, and all of some objects."""
        own = {name for name in self._values if self.on_host or isinstance(getattr(self, name), int | float)}
        return own.union(*({f"{name}.{key}" for key in part.counters()} for name, part in self._parts.items()))

    def move(self, transfer: Callable[[Tensor], Tensor]) -> None:
        """Apply a transfer (to another device or dtype) to everything declared."""
        for name in self._values:
            value = getattr(self, name)
            if isinstance(value, Tensor) and not self.on_host:
                setattr(self, name, transfer(value))
        for module in self._modules_.values():
            move_module(module, transfer)
        for part in self._parts.values():
            part.move(transfer)


def undo_changes(tensors: Sequence[Tensor]) -> Callable[[], None]:
    """Copy tensors; return a function that copies the values back."""
    copies = [tensor.detach().clone() for tensor in tensors]

    @torch.no_grad()
    def undo() -> None:
        for tensor, before in zip(tensors, copies, strict=True):
            tensor.copy_(before)

    return undo


def move_module(module: nn.Module, transfer: Callable[[Tensor], Tensor]) -> None:
    """Apply a transfer to a module and keep its parameters the same objects: optimizers and methods refer to them."""
    # Torch does that by itself except where the new device has tensors of another kind (meta, XLA).
    first = next(module.parameters(), None)
    alike = first is None or torch._has_compatible_shallow_copy_type(first, transfer(first.detach().flatten()[:0]))
    swaps = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(swaps or not alike)
    try:
        module._apply(transfer)  # type: ignore[no-untyped-call]
    finally:
        torch.__future__.set_swap_module_params_on_conversion(swaps)


def part_of(state: Mapping[str, Tensor], name: str) -> dict[str, Tensor]:
    """Return the entries of a state below `name`, without that prefix."""
    return {key[len(name) + 1 :]: value for key, value in state.items() if key.startswith(f"{name}.")}


def _check_value(name: str, current: Value, value: Tensor) -> None:
    """Raise if a value of a state has another type than the present one."""
    expected = current.dtype if isinstance(current, Tensor) else "one number"
    fits = value.dtype == expected if isinstance(current, Tensor) else current is None or value.ndim == 0
    if not fits:
        raise SnapshotError(f"state {name!r} is {value.dtype} of shape {tuple(value.shape)}; expected {expected}")
