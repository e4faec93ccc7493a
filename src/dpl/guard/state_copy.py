"""What the guard may do with an adapting model: let it act, ask it, copy what changes, put a copy back."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import reduce
from operator import is_not
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from dpl.core.state import Stateful
from dpl.guard.batch_dependence import stable_in_larger_batch
from dpl.methods.base import Method
from dpl.network import Network

__all__ = ["SavedState", "StateBuffer", "Ward", "all_finite", "relative_change", "stays_on_host"]

State = dict[str, Tensor]
_SMALL = 4096  # values of a tensor
_HUGE = 1e30  # the next sum or square overflows
_Slot = tuple[str, Mapping[str, Tensor | None], str]  # name in the state_dict, dictionary of the layer, key there


@dataclass(frozen=True)
class Ward:
    """The reins of one adapting model."""

    network: Network
    method: Method[Any]
    origin: Mapping[str, Tensor]  # the state to which a reset returns
    act: Callable[[Tensor], Tensor]  # predict and adapt
    restore: Callable[[Mapping[str, Tensor]], None]  # set everything but the guard to a whole state

    def predict(self, images: Tensor, reason: str) -> Tensor:
        """Predict and change nothing."""
        self.method.facts = {"updated": False, "reason": reason}
        return self.method.predict(images).detach()

    def answers_kept(self, images: Tensor) -> Tensor:
        """Return which predictions of the present state are stable in a larger batch [n]."""
        return stable_in_larger_batch(self.method.predict, images)

    def tensors(self) -> list[Tensor]:
        """Return what a step can change in network and optimizers; weights that do not train are left out."""
        trained, kept = self._slots()
        values = [value for _, held, key in trained if (value := held[key]) is not None and value.requires_grad]
        values += [value for _, held, key in kept if (value := held[key]) is not None]
        for optimizer in self.method.optimizers.values():
            values += optimizer.tensors()
        return values

    def names(self) -> list[str]:
        """Return the names of `tensors`, in their order, as in a whole state."""
        trained, kept = self._slots()
        names = [f"model.{n}" for n, held, key in trained if (value := held[key]) is not None and value.requires_grad]
        names += [f"model.{name}" for name, held, key in kept if held[key] is not None]
        for owner, optimizer in self.method.optimizers.items():
            names += [f"{owner}.{name}" for name in optimizer.names()]
        return names

    def rest(self) -> State:
        """Return a copy of what else a step can change: the method's memory and its random numbers."""
        state = {f"method.{key}": value for key, value in self.method.state().items()}
        return state | {"generator": self.method.random.generator.get_state()}

    def put_back(self, state: Mapping[str, Tensor] | None) -> None:
        """Return to a copy of everything that a step can change, or with None to the origin."""
        if state is None:
            self.restore(self.origin)
        else:
            self.restore({k: v for k, v in self.origin.items() if k.startswith("model.")} | dict(state))

    def is_finite(self, logits: Tensor) -> bool:
        """Say whether logits, loss and every parameter that trains are finite (a bad gradient shows in those)."""
        loss = self.method.facts.get("loss")
        values = [logits, *self.method.trainable.values()]
        return all_finite([*values, loss] if isinstance(loss, Tensor) else values)

    def drift(self) -> float:
        """Return how far the trained parameters of the network moved from the source, relative to their size."""
        found = ((name, held[key]) for name, held, key in self._slots()[0])
        return relative_change(
            [(v, self.origin[f"model.{name}"]) for name, v in found if v is not None and v.requires_grad]
        )

    def facts(self) -> dict[str, float | None]:
        """Return what the look shows besides the answers: drift, and the share of rows that the method learns from."""
        share = self.method.facts.get("selected", self.method.facts.get("confident"))
        return {"drift": self.drift(), "selected": None if share is None else float(share)}

    def _slots(self) -> tuple[list[_Slot], list[_Slot]]:
        """Return where the network holds its parameters and its saved buffers; walking it costs a tenth of a step."""
        if self.method not in _known:
            layers = [(f"{n}." if n else "", m) for n, m in self.network.module.named_modules(remove_duplicate=False)]
            parameters = [(at + key, layer._parameters, key) for at, layer in layers for key in layer._parameters]
            buffers = [(at + key, layer._buffers, key) for at, layer in layers for key in _saved(layer)]
            _known[self.method] = parameters, buffers
        return _known[self.method]


_known: "WeakKeyDictionary[Method[Any], tuple[list[_Slot], list[_Slot]]]" = WeakKeyDictionary()


def _saved(layer: nn.Module) -> list[str]:
    return [key for key in layer._buffers if key not in layer._non_persistent_buffers_set]


@torch.no_grad()
def all_finite(values: Iterable[Tensor]) -> bool:
    """Say whether all floating-point tensors are finite, and so small that sums of theirs are; the host waits once."""
    floats = _joined([v for v in values if v.is_floating_point() and v.numel() > 0])
    if not floats:
        return True
    bounds = [bound for value in floats for bound in torch.aminmax(value)]  # NaN is both
    if len(floats) > 1:
        kind, device = reduce(torch.promote_types, (bound.dtype for bound in bounds)), bounds[0].device
        bounds = [bound.to(device, kind) for bound in bounds]
    return all(abs(bound) <= _HUGE for bound in torch.stack(bounds).tolist())


def _joined(values: list[Tensor]) -> list[Tensor]:
    """Return small tensors as a few long ones: a call for each costs more than looking at what is in it."""
    groups: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for value in values:
        if value.numel() <= _SMALL:
            groups.setdefault((value.dtype, value.device), []).append(value.flatten())
    return [torch.cat(group) for group in groups.values()] + [value for value in values if value.numel() > _SMALL]


@torch.no_grad()
def relative_change(pairs: list[tuple[Tensor, Tensor]]) -> float:
    """Return |new - old| / |old| over all pairs taken together."""
    if not pairs:
        return 0.0
    new, old = [n.detach() for n, _ in pairs], [o for _, o in pairs]
    moved, size = (torch.stack(torch._foreach_norm(x)).norm() for x in (torch._foreach_sub(new, old), old))
    return float(moved / size.clamp(min=1e-12))


class StateBuffer:
    """A copy of what a step can change; its memory is reused as long as the same tensors are copied."""

    def __init__(self) -> None:
        self._names: list[str] = []
        self._copied: list[Tensor] = []
        self._copies: list[Tensor] = []
        self._rest: State = {}

    @torch.no_grad()
    def copy(self, ward: Ward) -> None:
        """Copy everything that a step can change."""
        values = ward.tensors()
        if len(values) != len(self._copied) or any(map(is_not, values, self._copied)):
            self._names, self._copied = ward.names(), values
            self._copies = [torch.empty_like(value, requires_grad=False) for value in values]
        if values:
            torch._foreach_copy_(self._copies, values)
        self._rest = ward.rest()

    def state(self) -> State:
        """Return what was copied; it is valid until the next `copy`."""
        return dict(zip(self._names, self._copies, strict=True)) | self._rest


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


def stays_on_host(key: str) -> bool:
    """Say whether an entry of a state stays on the CPU in its own type."""
    return key == "generator" or key.endswith("/step")
