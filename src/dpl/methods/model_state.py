"""Everything that adaptation changes, as one object: network, method, optimizers and random generator.

`state_dict`, reset, the guard and the server all copy and restore a model through it.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from dpl.core.errors import SnapshotError
from dpl.core.state import part_of, undo_changes
from dpl.methods.base import Method
from dpl.methods.parts.norm_rules import BatchStatistics, BlendedStatistics, RunningStatistics
from dpl.methods.settings import GradientSettings
from dpl.network import Network
from dpl.network.norm_control import Rule
from dpl.network.split import logits_of

__all__ = ["ModelState", "State", "stays_on_host"]

State = dict[str, Tensor]
_Place = tuple[str, Mapping[str, Tensor | None], str]  # name in the state, dictionary of the layer, key there


class ModelState:
    """The state of one adapting model, and the state to which `reset` returns."""

    origin: State

    def __init__(self, network: Network, method: Method[Any]) -> None:
        self.network, self.method = network, method
        self._places = _places(network.module)
        self.origin = self.copy()
        # What a failed call returns to; None outside a call.
        self.kept: tuple[list[Any], Tensor, dict[str, Any]] | None = None
        self._undo: list[Callable[[], None]] = []
        self._find_what_a_call_changes()
        for part in method.of_stream.values():
            part.model = self

    def begin(self, *, may_fail_later: bool) -> None:
        """Prepare to undo a call that fails: remember values by reference, and copy what is changed in place.

        Weights and optimizer are copied only if something may fail after the optimizer's step (`may_fail_later`, or a
        method whose step goes on): a copy of them all would cost as much as the step of a small batch.
        """
        self.kept = list(map(dict.get, *self._declared)), self.method.random.generator.get_state(), self.method.facts
        self._undo = []
        if self._is_plain and not may_fail_later:
            return
        self._undo.append(undo_changes([value for _, value in _held(self._places[1])]))
        self._undo += [undo for owner in self.method.everyone() if (undo := owner.keep()) is not None]
        if may_fail_later or not self._commits_last:
            self._keep_trained()

    def undo(self) -> None:
        """Return to the state at `begin`."""
        if self.kept is None:
            return
        values, generator, self.method.facts = self.kept
        for held, name, value in zip(*self._declared, values, strict=True):
            held[name] = value
        for undo in reversed(self._undo):
            undo()
        self.method.random.generator.set_state(generator)
        for parameter in self.method.trainable.values():
            parameter.grad = None
        if self.method.effective_batch is not None:
            self.method.effective_batch.follow()
        self.kept = None

    def _keep_trained(self) -> None:
        self._undo.append(undo_changes([value for _, value in self._trained()]))
        self._undo += [optimizer.keep() for optimizer in self.method.optimizers.values()]

    def _find_what_a_call_changes(self) -> None:
        """Say once what `begin` has to do: for most methods remembering a few references is enough."""
        method, rule = self.method, self.network.norm.rule
        places = self.method.declared()
        self._declared: tuple[list[Any], list[str]] = [held for held, _ in places], [name for _, name in places]
        s = method.settings
        once = isinstance(s, GradientSettings) and s.steps == 1 and s.output == "before"
        atomic = all(optimizer.is_atomic for optimizer in method.optimizers.values())
        self._commits_last = method.commits_last and once and atomic
        stateless = isinstance(rule, RunningStatistics | BatchStatistics | BlendedStatistics)
        in_place = any(owner.works_in_place for owner in method.everyone())
        self._is_plain = self._commits_last and stateless and not in_place

    def copy(self) -> State:
        """Return a copy of everything, as flat tensors."""
        state = {f"model.{key}": value.detach().clone() for key, value in self.network.module.state_dict().items()}
        for name, optimizer in self.method.optimizers.items():
            state |= {f"{name}.{key}": value for key, value in optimizer.state().items()}
        return state | self.rest()

    def check(self, state: Mapping[str, Tensor]) -> None:
        """Raise if `state` does not fit this model; change nothing."""
        names = ["model", "method", *self.method.optimizers]
        parts = {name: part_of(state, name) for name in names}
        known = {"generator"}.union(*({f"{name}.{key}" for key in part} for name, part in parts.items()))
        unknown = set(state) - known
        if unknown or "generator" not in state:
            raise SnapshotError(f"not a state of this adaptive model: {sorted(unknown)[:4] or 'no generator'}")
        own = {key: (value.shape, value.dtype) for key, value in self.network.module.state_dict().items()}
        given = {key: (value.shape, value.dtype) for key, value in parts["model"].items()}
        if own != given:
            name = next(key for key in own | given if own.get(key) != given.get(key))
            raise SnapshotError(
                f"the state's model has other parameters, shapes or types than this one, e.g. {name!r}: "
                f"{given.get(name, 'missing')} instead of {own.get(name, 'nothing')}"
            )
        self.method.check(parts["method"])
        for name, optimizer in self.method.optimizers.items():
            optimizer.check(parts[name])

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Set everything to a copy of `state` (checked before)."""
        self.network.module.load_state_dict(part_of(state, "model"))
        device, counters = self.network.device, self.method.counters()
        own = part_of(state, "method").items()
        self.method.restore({key: value if key in counters else value.to(device) for key, value in own})
        for name, optimizer in self.method.optimizers.items():
            optimizer.restore(part_of(state, name))
        self.method.random.generator.set_state(state["generator"].cpu())

    def move(self, transfer: Callable[[Tensor], Tensor]) -> None:
        """Follow the network, which has moved, to another device, type or memory layout."""
        states = {name: optimizer.state() for name, optimizer in self.method.optimizers.items()}
        self.method.move(transfer)
        for name, optimizer in self.method.optimizers.items():
            optimizer.restore({k: v if stays_on_host(k) else transfer(v) for k, v in states[name].items()})
        counters = {f"method.{key}" for key in self.method.counters()}
        stay = {key for key in self.origin if key in counters or stays_on_host(key)}
        self.origin = {key: value if key in stay else transfer(value) for key, value in self.origin.items()}
        self._find_what_a_call_changes()
        self.network.update_references()
        self.method.random.device = self.network.device

    def changing(self) -> State:
        """Return what a step can change in network and optimizers, not copied; frozen weights are left out."""
        state = {f"model.{name}": value for name, value in self._trained() + _held(self._places[1])}
        for owner, optimizer in self.method.optimizers.items():
            state |= {f"{owner}.{name}": value for name, value in optimizer.entries().items()}
        return state

    def rest(self) -> State:
        """Return a copy of what else a step can change: the method's memory and its random generator."""
        state = {f"method.{key}": value for key, value in self.method.state().items()}
        return state | {"generator": self.method.random.generator.get_state()}

    def put_back(self, changed: Mapping[str, Tensor] | None) -> None:
        """Return to a copy of `changing` and `rest`, or with None to the origin.

        What is known of the stream stays: the source model measured it, so adaptation cannot have harmed it.
        """
        state = {key: value for key, value in self.origin.items() if changed is None or key.startswith("model.")}
        seen = tuple(f"method.{name}." for name in self.method.of_stream)
        known = {key: value for key, value in self.rest().items() if key.startswith(seen)}
        self.restore(state | dict(changed or {}) | known)

    def restart(self) -> None:
        """Return to the origin within a call, which may fail."""
        if self.kept is not None:
            self._keep_trained()
        self.put_back(None)

    def measure_stream(self, images: Tensor) -> None:
        """Let the method measure a batch that it does not adapt to."""
        if self.method.effective_batch is not None:
            self.method.effective_batch.look(images)

    @torch.no_grad()
    def source_logits(self, images: Tensor, rule: Rule) -> Tensor:
        """Return the logits of the source weights under a rule for BatchNorm."""
        with self.network.norm.using(rule):
            return logits_of(functional_call(self.network.module, self.source_parameters(), (images,)))

    def source_parameters(self) -> State:
        """Return the source values of the parameters that train, by name, not copied."""
        return {name: self.origin[f"model.{name}"] for name, _ in self._trained()}

    def trained(self) -> list[tuple[Tensor, Tensor]]:
        """Return each parameter of the network that trains, with its source value."""
        return [(value, self.origin[f"model.{name}"]) for name, value in self._trained()]

    def _trained(self) -> list[tuple[str, Tensor]]:
        return [(name, value) for name, value in _held(self._places[0]) if value.requires_grad]


def _held(places: list[_Place]) -> list[tuple[str, Tensor]]:
    """Return the values at these places by name; a layer may hold None."""
    return [(name, value) for name, held, key in places if (value := held[key]) is not None]


def stays_on_host(key: str) -> bool:
    """Return whether an entry of a state stays on the CPU in its own type."""
    return key == "generator" or key.endswith("/step")


def _places(module: nn.Module) -> tuple[list[_Place], list[_Place]]:
    """Return where a network holds its parameters and saved buffers; to walk it at every step would cost a tenth."""
    layers = [(f"{name}." if name else "", layer) for name, layer in module.named_modules(remove_duplicate=False)]
    parameters = [(at + key, layer._parameters, key) for at, layer in layers for key in layer._parameters]
    saved = [(at, layer, key) for at, layer in layers for key in layer._buffers]
    buffers = [(at + k, lay._buffers, k) for at, lay, k in saved if k not in lay._non_persistent_buffers_set]
    return parameters, buffers
