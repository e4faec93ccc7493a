"""Optimizers by name, a step that can be called off on the device, and state by parameter name."""

from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from inspect import unwrap
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import SGD, Adam, Optimizer

from dpl.core.errors import SettingError, SnapshotError
from dpl.core.state import undo_changes

__all__ = ["NamedOptimizer", "OptimizerFactory"]

OptimizerFactory = Callable[[Iterable[Parameter]], Optimizer]


class NamedOptimizer:
    """An optimizer over named parameters."""

    def __init__(
        self, parameters: Mapping[str, Parameter], kind: str | OptimizerFactory, lr: float, weight_decay: float = 0.0
    ) -> None:
        self.parameters, self._named = dict(parameters), isinstance(kind, str)
        common: Any = {"lr": lr, "weight_decay": weight_decay, "fused": _can_be_fused(self.parameters.values())}
        sgd = partial(SGD, momentum=0.9, **common)
        named: dict[str, OptimizerFactory]
        named = {"adam": partial(Adam, **common), "sgd": sgd, "nesterov": partial(sgd, nesterov=True)}
        make = kind if callable(kind) else named.get(kind)
        if make is None:
            known = ", ".join(map(repr, named))
            raise SettingError(f"optimizer={kind!r}: expected {known} or a callable of the parameters")
        self.optimizer: Optimizer = make(list(self.parameters.values()))
        # Without hooks and the profiler's marks: nothing comes after the kernel that could fail.
        step = unwrap(type(self.optimizer).step)
        self._take_step = partial(step, self.optimizer) if self._named else self.optimizer.step
        self._factor: Tensor | float = 1.0  # of the learning rates, where the optimizer itself would have to read it

    def step(self, loss: Tensor, should_step: Tensor | None = None) -> Tensor | bool:
        """Back-propagate and update, unless `should_step` is false or float16 overflows; return whether it did.

        On a CPU the flag is read and the whole backward pass saved. Elsewhere reading it would make the
        device wait. There a caller's own optimizer alone has the flag read; others are called off on the device.
        """
        place = loss.device if should_step is None else should_step.device
        read = place.type == "cpu" or not self._named
        if read and should_step is not None:
            if not bool(should_step):
                return False
            should_step = None
        for parameter in self.parameters.values():
            parameter.grad = None
        loss.backward()  # type: ignore[no-untyped-call]
        kind = loss.device.type
        autocast = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
        if autocast and torch.get_autocast_dtype(kind) == torch.float16:
            finite = self.gradients_are_finite()
            if read and not bool(finite):
                return False  # the next step forgets the gradients
            should_step = should_step if read else finite if should_step is None else should_step & finite
        self.apply(should_step)
        return True if should_step is None else should_step

    def gradients_are_finite(self) -> Tensor:
        """Return whether all are, as a flag on the device; the length of a gradient tells it in one pass."""
        gradients = [p.grad for p in self.parameters.values() if p.grad is not None]
        return torch.stack(torch._foreach_norm(gradients)).isfinite().all()

    def apply(self, should_step: Tensor | None = None) -> None:
        """Update by the gradients there are, unless a flag on the device is false; then forget them."""
        held: Mapping[str, Any] = next(iter(self.optimizer.state.values()), {})
        count = held["step"].clone() if isinstance(held.get("step"), Tensor) else None
        try:
            with torch.no_grad():
                if should_step is not None and not self._is_fused:
                    self._masked_step(should_step)
                else:
                    if should_step is not None:  # the flag that also stops a mixed-precision step
                        self.optimizer.found_inf = (~should_step).float()  # type: ignore[attr-defined]
                    self._take_step()
        except BaseException:
            self._undo_begun_step(count, fresh=not held)
            raise
        finally:
            vars(self.optimizer).pop("found_inf", None)
        for parameter in self.parameters.values():
            parameter.grad = None  # not by `zero_grad`, whose mark for the profiler may fail after the step

    def _undo_begun_step(self, count: Tensor | None, *, fresh: bool) -> None:
        """Undo what comes before a fused kernel, which fails as a whole: new state, and counts of steps."""
        if fresh:
            self.optimizer.state.clear()
        elif count is not None:
            counts = [held["step"] for held in self.optimizer.state.values()]
            if not torch.equal(counts[0], count):
                torch._foreach_sub_(counts, 1)

    def keep(self) -> Callable[[], None]:
        """Return a function that puts back the optimizer's state; its parameters belong to others, who keep them."""
        held = {parameter: dict(entries) for parameter, entries in self.optimizer.state.items()}
        rates = [group["lr"] for group in self.optimizer.param_groups]
        undo = undo_changes([*self.entries().values()])

        def put_back() -> None:
            self.optimizer.state.clear()
            self.optimizer.state.update(held)
            for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
                group["lr"] = rate
            undo()

        return put_back

    @property
    def is_atomic(self) -> bool:
        """Whether a step is one kernel that changes all parameters or, where it fails, none."""
        kinds = {(parameter.dtype, parameter.device) for parameter in self.parameters.values()}
        return self._named and self._is_fused and len(self.optimizer.param_groups) == len(kinds) == 1

    @property
    def _is_fused(self) -> bool:
        return bool(self.optimizer.param_groups[0].get("fused"))

    def give_rate(self, names: Collection[str], lr: float) -> None:
        """Give some of the parameters a learning rate of their own; to be called once, before the first step."""
        groups = {own: [p for name, p in self.parameters.items() if (name in names) == own] for own in (False, True)}
        self.optimizer.param_groups[0]["params"] = groups[False]
        self.optimizer.add_param_group({"params": groups[True], "lr": lr})

    def scale_lr(self, factor: Tensor | float) -> None:
        """Set the learning rates to the given ones times a factor, which may stay on the device."""
        if isinstance(factor, Tensor) and factor.device.type != "cpu" and not self._is_fused:
            self._factor = factor
            return
        for group in self.optimizer.param_groups:
            group["lr"] = group.setdefault("initial_lr", group["lr"]) * factor

    def _masked_step(self, should_step: Tensor) -> None:
        """Step, and take it back on the device where the flag is false; only counts on the host go on."""
        devices = {parameter.device for parameter in self.parameters.values()}
        before = {name: value.clone() for name, value in (self.parameters | self.entries()).items()}
        self._take_step()
        for name, parameter in self.parameters.items():
            parameter.sub_(before[name]).mul_(self._factor).add_(before[name])
        for name, value in (self.parameters | self.entries()).items():
            if value.device in devices:
                value.copy_(torch.where(should_step, value, before.get(name, torch.zeros_like(value))))

    def entries(self) -> dict[str, Tensor]:
        """Return the optimizer's state by name, `<parameter>/<entry>`, not copied."""
        held = {name: sorted(self.optimizer.state.get(p, {}).items()) for name, p in self.parameters.items()}
        return {f"{name}/{k}": torch.as_tensor(v) for name, own in held.items() for k, v in own if v is not None}

    def state(self) -> dict[str, Tensor]:
        """Return a copy of the optimizer's state as flat tensors."""
        return {name: value.detach().clone() for name, value in self.entries().items()}

    def check(self, flat: Mapping[str, Tensor]) -> None:
        """Raise if `flat` names a parameter that does not train here, or does not fit it."""
        unknown = {name.rpartition("/")[0] for name in flat} - set(self.parameters)
        if unknown:
            raise SnapshotError(f"optimizer state for parameters that do not train here: {sorted(unknown)[:4]}")
        for name, value in flat.items():
            shape = self.parameters[name.rpartition("/")[0]].shape
            if not value.is_floating_point() or value.shape not in (shape, torch.Size([])):
                raise SnapshotError(f"optimizer state {name!r} is {value.dtype} of shape {tuple(value.shape)}")

    def restore(self, flat: Mapping[str, Tensor]) -> None:
        """Set the optimizer's state to a copy of `flat`; what is not there is unset."""
        index = {name: i for i, name in enumerate(self.parameters)}
        state: dict[int, dict[str, Any]] = {}
        for key, value in flat.items():
            name, _, entry = key.rpartition("/")
            like, held = self.parameters[name], value.clone()
            if value.shape == like.shape:  # a fused step goes through both in the order of their memory
                held = torch.empty_like(like, dtype=value.dtype, device=value.device, requires_grad=False).copy_(value)
            state.setdefault(index[name], {})[entry] = held
        groups = self.optimizer.state_dict()["param_groups"]
        if self._named:  # the parameters may have moved
            groups = [group | {"fused": _can_be_fused(self.parameters.values())} for group in groups]
        self.optimizer.load_state_dict({"state": state, "param_groups": groups})
        self.optimizer.zero_grad()


def _can_be_fused(parameters: Iterable[Tensor]) -> bool:
    return all(p.is_floating_point() and p.device.type in ("cpu", "cuda") for p in parameters)
