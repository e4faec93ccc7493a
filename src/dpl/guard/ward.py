"""What the guard may do with an adapting model: let it act, ask it, copy what changes, put a copy back."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from dpl.methods.base import Method
from dpl.methods.state import Stateful
from dpl.surgery import Network

__all__ = ["KeptState", "Ward", "all_finite", "relative_change", "stays_on_host"]

State = dict[str, Tensor]


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

    def changing(self) -> State:
        """Return a copy of everything that a step can change; weights that do not train are left out."""
        state = {f"model.{name}": value.detach().clone() for name, value in self._live()}
        state |= {f"method.{key}": value for key, value in self.method.state().items()}
        for name, optimizer in self.method.optimizers.items():
            state |= {f"{name}.{key}": value for key, value in optimizer.state().items()}
        return state | {"generator": self.method.random.generator.get_state()}

    def put_back(self, state: Mapping[str, Tensor] | None) -> None:
        """Return to a copy made by `changing`, or with None to the origin."""
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
        pairs = [(value, self.origin[f"model.{name}"]) for name, value in self._live() if value.requires_grad]
        return relative_change(pairs)

    def facts(self) -> dict[str, float | None]:
        """Return what the look shows besides the answers: drift, and the share of rows that the method learns from."""
        share = self.method.facts.get("selected", self.method.facts.get("confident"))
        return {"drift": self.drift(), "selected": None if share is None else float(share)}

    def _live(self) -> Iterable[tuple[str, Tensor]]:
        """Yield what a step can change in the network, by the names of its `state_dict`."""
        for prefix, module in _carriers(self.method, self.network.module):
            for name, parameter in module._parameters.items():
                if parameter is not None and parameter.requires_grad:
                    yield prefix + name, parameter
            for name, buffer in module._buffers.items():
                if buffer is not None and name not in module._non_persistent_buffers_set:
                    yield prefix + name, buffer


_known: "WeakKeyDictionary[Method[Any], list[tuple[str, nn.Module]]]" = WeakKeyDictionary()


def _carriers(method: Method[Any], network: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the layers that hold tensors, found once for each method: walking a network costs a tenth of a step."""
    if method not in _known:
        named = network.named_modules(remove_duplicate=False)
        _known[method] = [(f"{name}." if name else "", m) for name, m in named if m._parameters or m._buffers]
    return _known[method]


@torch.no_grad()
def all_finite(values: Iterable[Tensor]) -> bool:
    """Say whether all floating-point tensors are finite; the host waits for the answer once."""
    floats = [v.detach() for v in values if v.is_floating_point() and v.numel() > 0]
    if not floats:
        return True
    sums = torch.stack([total.float() for total in torch._foreach_norm(floats, 1)])
    return bool(sums.isfinite().all())


@torch.no_grad()
def relative_change(pairs: list[tuple[Tensor, Tensor]]) -> float:
    """Return |new - old| / |old| over all pairs taken together."""
    if not pairs:
        return 0.0
    new, old = [n.detach() for n, _ in pairs], [o for _, o in pairs]
    moved, size = (torch.stack(torch._foreach_norm(x)).norm() for x in (torch._foreach_sub(new, old), old))
    return float(moved / size.clamp(min=1e-12))


class KeptState(Stateful):
    """A copy of a whole state, or nothing."""

    def __init__(self) -> None:
        super().__init__()
        self._state: State = {}

    @property
    def exists(self) -> bool:
        """Say whether there is a copy."""
        return bool(self._state)

    def keep(self, state: State) -> None:
        """Keep this state (not copied) instead of the one before."""
        self._state = state

    def drop(self) -> None:
        """Keep nothing."""
        self._state = {}

    def state(self) -> State:
        """Return a copy."""
        return {key: value.clone() for key, value in self._state.items()}

    def check(self, state: Mapping[str, Tensor]) -> None:
        """Accept any: it is checked against the model when it is put back."""

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Keep a copy of `state`."""
        self._state = {key: value.clone() for key, value in state.items()}

    def move(self, transfer: Callable[[Tensor], Tensor]) -> None:
        """Move what lives on the model's device."""
        self._state = {k: v if stays_on_host(k) else transfer(v) for k, v in self._state.items()}


def stays_on_host(key: str) -> bool:
    """Say whether an entry of a state stays on the CPU in its own type."""
    return key == "generator" or key.endswith("/step")
