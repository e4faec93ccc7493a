"""How a method behaves on a device, proven without one.

Torch's `meta` device has shapes and types but no values. There an operation that mixes devices fails, and so does
every read on the host. `HostReads` counts these reads and answers each with ones, so that a step can go on. A run with
no read is a proof that the step stays on its device and that the host never waits for it.
"""

import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from dpl.methods.model_state import stays_on_host
from dpl.model.adaptive import AdaptiveModel
from dpl.testing.checks import Subject

__all__ = ["DeviceRun", "HostReads", "run_on_meta"]

_HOST, _META = torch.device("cpu"), torch.device("meta")
_aten = torch.ops.aten


class HostReads(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts what the host reads from tensors on `meta` inside the block; every value read is one."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.reads: Counter[str] = Counter()

    @property
    def total(self) -> int:
        """The number of reads."""
        return self.reads.total()

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Answer a read of a meta tensor; pass everything else on."""
        kwargs = kwargs or {}
        tensors = [value for value in args if isinstance(value, Tensor)]
        if func in _ANSWERS and any(tensor.device == _META for tensor in tensors):
            read = _ANSWERS[func](*args, **kwargs)
            if read is not None:
                self.reads[func._schema.name.removeprefix("aten::")] += 1
                return read
        return func(*args, **kwargs)


def _to_host(tensor: Tensor, *, device: torch.device | None = None, dtype: Any = None, **_other: Any) -> Tensor | None:
    return torch.ones(tensor.shape, dtype=dtype or tensor.dtype) if device == _HOST else None


def _all_rows(mask: Tensor) -> Tensor:
    return torch.empty(mask.numel(), mask.ndim, dtype=torch.int64, device=_META)


def _indexed(tensor: Tensor, indices: Sequence[Tensor | None]) -> Tensor | None:
    """Index by a mask as if all of it were true."""
    masks = [index is not None and index.dtype == torch.bool for index in indices]
    if tensor.device != _META or not any(masks):
        return None
    rows = [
        _all_rows(index).unbind(1) if is_mask else (index,)  # type: ignore[arg-type]
        for index, is_mask in zip(indices, masks, strict=True)
    ]
    return _aten.index.Tensor(tensor, list(chain(*rows)))  # type: ignore[no-any-return]


def _unique(tensor: Tensor, *_args: Any, **_kwargs: Any) -> tuple[Tensor, Tensor, Tensor]:
    places = torch.empty(tensor.shape, dtype=torch.int64, device=_META)
    return torch.empty_like(tensor).flatten(), places, places.flatten()


def _counts(tensor: Tensor, _weights: Tensor | None = None, minlength: int = 0) -> Tensor:
    return torch.empty(max(minlength, 1), dtype=torch.int64, device=_META)


# What the host would read of a tensor on `meta`; None: this call reads nothing.
_ANSWERS: dict[Any, Callable[..., Any]] = {
    _aten._local_scalar_dense.default: lambda tensor: torch.ones((), dtype=tensor.dtype).item(),
    _aten._to_copy.default: _to_host,
    _aten.copy_.default: lambda own, *_: own.fill_(1) if own.device == _HOST else None,
    _aten.nonzero.default: _all_rows,
    _aten.index.Tensor: _indexed,
    _aten._unique2.default: _unique,
    _aten.bincount.default: _counts,
    _aten.equal.default: lambda *_, **__: True,
    _aten.allclose.default: lambda *_, **__: True,
}


@dataclass(frozen=True)
class DeviceRun:
    """What a run away from the CPU showed."""

    step_reads: Counter[str]  # of the step that read most
    predict_reads: Counter[str]

    @property
    def host_reads(self) -> int:
        """The most reads of one step."""
        return self.step_reads.total()


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
    host = HostReads()
    with host:
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
