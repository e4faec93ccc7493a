"""What single operations of torch show: whether a step stays on its device, and what a failure leaves behind.

Torch's `meta` device has shapes and types but no values. There an operation that mixes devices fails, and so does
every read on the host. `HostReads` counts these reads and answers each with ones, so that a step can go on. A run with
no read is a proof that the step stays on its device and that the host never waits for it.

`FailAt` counts the operations of a block and raises at the k-th. `first_change` runs a step for many k and compares
the model's whole state, before and after: weights, optimizer, memory, generator, guard, counters.
"""

import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from dpl.methods.model_state import stays_on_host
from dpl.model.adaptive import AdaptiveModel
from dpl.testing import Subject, changed_keys

__all__ = ["DeviceRun", "FailAt", "HostReads", "Injected", "count_operations", "first_change", "run_on_meta"]

_HOST, _META = torch.device("cpu"), torch.device("meta")
_aten = torch.ops.aten


class HostReads(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts what the host reads from tensors on `meta` inside the block; every value read is one."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.reads: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Answer a read of a meta tensor; pass everything else on."""
        kwargs = kwargs or {}
        tensors = [value for value in args if isinstance(value, Tensor)]
        if func in _ANSWERS and any(tensor.device == _META for tensor in tensors):
            read = _ANSWERS[func](*args, **kwargs)
            if read is not None:
                self.reads[func._schema.name.removeprefix("aten::")] += 1
                return read
        return func(*args, **kwargs)


def _ints(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.int64, device=_META)


def _indexed(tensor: Tensor, indices: Sequence[Tensor | None]) -> Tensor | None:
    """Index by a mask as if all of it were true."""
    masks = [index is not None and index.dtype == torch.bool for index in indices]
    if tensor.device != _META or not any(masks):
        return None
    rows = [
        _ints(index.numel(), index.ndim).unbind(1) if is_mask else (index,)  # type: ignore[union-attr]
        for index, is_mask in zip(indices, masks, strict=True)
    ]
    return _aten.index.Tensor(tensor, list(chain(*rows)))  # type: ignore[no-any-return]


# What the host would read of a tensor on `meta`; None: this call reads nothing.
_ANSWERS: dict[Any, Callable[..., Any]] = {
    _aten._local_scalar_dense.default: lambda tensor: torch.ones((), dtype=tensor.dtype).item(),
    _aten._to_copy.default: lambda own, dtype=None, device=None, **_: (
        torch.ones(own.shape, dtype=dtype or own.dtype) if device == _HOST else None
    ),
    _aten.copy_.default: lambda own, *_: own.fill_(1) if own.device == _HOST else None,
    _aten.nonzero.default: lambda mask: _ints(mask.numel(), mask.ndim),
    _aten.index.Tensor: _indexed,
    _aten._unique2.default: lambda own, *_, **__: (own.flatten().clone(), _ints(*own.shape), _ints(own.numel())),
    _aten.bincount.default: lambda own, weights=None, minlength=0: _ints(max(minlength, 1)),
    _aten.equal.default: lambda *_, **__: True,
    _aten.allclose.default: lambda *_, **__: True,
}


class DeviceRun(NamedTuple):
    """What the host read in a run away from the CPU, by operation."""

    step: Counter[str]  # the step that read most
    predict: Counter[str]


def run_on_meta(subject: Subject, steps: int = 4) -> DeviceRun:
    """Move a model that has adapted to `meta`, reset it, adapt, save its state and load one from the CPU.

    Raises what torch raises where a step mixes devices.
    """
    model = subject.adapt()
    subject.run(model, 2)
    on_host = model.state_dict()
    model.to(_META)
    _everything_moved(model)
    model.reset()
    images = [batch.to(_META) for batch in subject.batches]
    reads = [_reads_of(model, images[i % len(images)]) for i in range(steps)]
    _everything_moved(model)
    predicted = _reads_of(model.predict, images[0])
    model.load_state_dict(model.state_dict())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that a copy to meta copies no values
        model.load_state_dict(on_host)
    reads.append(_reads_of(model, images[0]))
    _everything_moved(model)
    model.reset()
    return DeviceRun(max(reads, key=Counter.total), predicted)


def _reads_of(call: Callable[[Tensor], Tensor], images: Tensor) -> Counter[str]:
    with HostReads() as host:
        logits = call(images)
    if logits.device != _META or len(logits) != len(images):
        raise AssertionError(
            f"logits {tuple(logits.shape)} on {logits.device} for images {tuple(images.shape)} on meta"
        )
    return Counter(host.reads)


def _everything_moved(model: AdaptiveModel) -> None:
    """Require that weights and the tensors of method, guard and estimate are on the device; numbers and counts stay."""
    left = [name for name, value in model.model.state_dict(keep_vars=True).items() if value.device != _META]
    left += [name for name, parameter in model.method.trainable.items() if parameter.device != _META]
    for part in (model.method, model.guard, model.watch):
        state, on_host = ({}, set[str]()) if part is None else (part.state(), part.counters())
        stay = on_host | {name for name in state if stays_on_host(name.removeprefix("good."))}
        left += [name for name, value in state.items() if name not in stay and value.device != _META]
    if left:
        raise AssertionError(f"these were left on the CPU: {left[:4]}")


class Injected(Exception):
    """The exception that is raised on purpose."""


class FailAt(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Raises at the operation of the given number (0: never); `seen` counts them."""

    def __init__(self, number: int = 0, error: type[BaseException] = Injected) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.number, self.error, self.seen = number, error, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count, and fail once."""
        self.seen += 1
        if self.seen == self.number:
            raise self.error(f"at operation {self.number}, {func}")
        return func(*args, **(kwargs or {}))


def count_operations(model: AdaptiveModel, images: Tensor) -> int:
    """Return how many torch operations a step takes; the model is as before."""
    before = model.state_dict()
    with FailAt() as mode:
        model(images)
    model.load_state_dict(before)
    return int(mode.seen)


def first_change(model: AdaptiveModel, images: Tensor, points: Sequence[int]) -> str | None:
    """Fail at each of these operations; return what the first failure changed, or None."""
    images.grad = None
    before, last = model.state_dict(), dict(model.last)
    for number in points:
        try:
            with FailAt(number):
                model(images)
        except Injected:
            changed = changed_keys(before, model.state_dict())
            if changed or dict(model.last) != last or images.grad is not None:
                return f"operation {number}: {changed or 'model.last or images.grad'}"
        else:
            return f"operation {number}: the exception was swallowed"
    return None
