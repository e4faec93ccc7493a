"""Numerics that several rooms share: precision, cosines, moments of feature maps, finiteness, reading on the host."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from itertools import islice
from typing import Any, ParamSpec

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from dpl.core.errors import InputError, SettingError

__all__ = [
    "all_finite", "are_finite", "at_least_float32", "bounds", "cosines", "full_precision", "is_autocast_on",
    "nonfinite_as_zeros", "nonfinite_rows", "read_together", "same_class", "variance_and_mean", "without_autocast",
]  # fmt: skip

P = ParamSpec("P")

_SMALL = 4096  # values of a tensor; a call for each smaller one would cost more than looking at what is in it
_HUGE = 1e30  # the next sum or square overflows


def same_class(logits: Tensor) -> Tensor:
    """Return for each row of a batch the share of the other rows that are predicted as the same class."""
    predicted = logits.argmax(dim=1)
    equal = (predicted[:, None] == predicted).sum(dim=1) - 1
    return equal / max(1, len(predicted) - 1)


def at_least_float32(tensor: Tensor) -> Tensor:
    """Return a half-precision tensor as float32, any other tensor unchanged."""
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


def read_together(**values: Tensor) -> dict[str, list[float]]:
    """Bring a few numbers to the host in one transfer, by name: away from the CPU the host waits for each transfer."""
    if not values:
        return {}
    parts = [value.detach().flatten() for value in values.values()]
    read = iter(torch.cat([part.to(parts[0].device, torch.float64) for part in parts]).tolist())
    return {name: list(islice(read, len(part))) for name, part in zip(values, parts, strict=True)}


def without_autocast(device: torch.device) -> AbstractContextManager[object]:
    """Return a context in which no autocast is on for this device."""
    available = torch.amp.is_autocast_available(device.type)
    return torch.autocast(device.type, enabled=False) if available else nullcontext()


def is_autocast_on(device: torch.device) -> bool:
    """Return whether autocast is on; not every kind of device knows it."""
    return torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(device.type)


def full_precision(loss: Callable[P, Tensor]) -> Callable[P, Tensor]:
    """Run `loss` outside autocast: at tau = 0.01 a bfloat16 cosine would be wrong by 0.4 in the exponent."""

    @wraps(loss)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> Tensor:
        inputs: list[Any] = [*args, *kwargs.values()]
        device = next(value.device for value in inputs if isinstance(value, Tensor))
        raised: Any = [at_least_float32(value) if isinstance(value, Tensor) else value for value in inputs]
        with without_autocast(device):
            return loss(*raised[: len(args)], **dict(zip(kwargs, raised[len(args) :], strict=True)))

    return wrapped


def cosines(anchors: Tensor, vectors: Tensor, temperature: float = 1.0, rows: Tensor | None = None) -> Tensor:
    """Return cos(anchor_i, vector_j) / temperature, [N, d] and [M, d] -> [N, M], in float32 or better.

    `rows` [R] selects and repeats anchors: the result is then [R, M]. Autocast is switched off, as in `full_precision`.
    """
    if not temperature > 0:
        raise SettingError(f"temperature={temperature!r}: expected a number above 0 (0.1 is the default of DPL)")
    if anchors.ndim != 2 or vectors.ndim != 2 or anchors.shape[1] != vectors.shape[1]:
        raise InputError(
            f"vectors of shapes {tuple(anchors.shape)} and {tuple(vectors.shape)} cannot be compared; "
            "expected prototypes [C, d] and features [B, d] with the same d"
        )
    kind = vectors.device.type  # as `without_autocast`, without a call: this is the way of every DPL step
    with torch.autocast(kind, enabled=False) if torch.amp.is_autocast_available(kind) else nullcontext():
        anchors = anchors.to(torch.promote_types(anchors.dtype, torch.float32))
        vectors = vectors.to(torch.promote_types(vectors.dtype, torch.float32))
        chosen = anchors if rows is None else anchors[rows]
        return F.normalize(chosen, dim=1) @ F.normalize(vectors, dim=1).T / temperature


def variance_and_mean(maps: Tensor, dims: Sequence[int], correction: int = 0) -> tuple[Tensor, Tensor]:
    """Return both over `dims`, which are kept with size one; the same values as `torch.var_mean`."""
    if maps.device.type != "cpu":
        return torch.var_mean(maps, dim=list(dims), correction=correction, keepdim=True)
    both: tuple[Tensor, Tensor] = _Moments.apply(at_least_float32(maps), tuple(dims), correction)  # type: ignore[no-untyped-call]
    return both


class _Moments(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, maps: Tensor, dims: tuple[int, ...], correction: int) -> tuple[Tensor, Tensor]:
        mean = maps.mean(dims, keepdim=True)
        centred = maps - mean
        ctx.count = maps.numel() // max(mean.numel(), 1)
        ctx.freedom = ctx.count - correction
        ctx.save_for_backward(maps, mean)
        return torch.mul(centred, centred, out=centred).sum(dims, keepdim=True) / ctx.freedom, mean

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_variance: Tensor, of_mean: Tensor) -> tuple[Tensor, None, None]:
        maps, mean = ctx.saved_tensors
        slope = of_variance * (2 / ctx.freedom)
        return torch.addcmul(of_mean / ctx.count - slope * mean, maps, slope), None, None


@torch.no_grad()
def bounds(values: Iterable[object]) -> Tensor:
    """Return the smallest and largest values of all floating-point tensors, for `are_finite`; NaN is both."""
    floats = [x for x in values if isinstance(x, Tensor) and x.is_floating_point() and x.numel() > 0]
    if not floats:
        return torch.empty(0)
    device = floats[0].device
    small = [value.flatten().to(device) for value in floats if value.numel() <= _SMALL]
    tensors = [*([torch.cat(small)] if small else []), *(value for value in floats if value.numel() > _SMALL)]
    return torch.cat([torch.stack(torch.aminmax(value)).to(device, torch.float64) for value in tensors])


def are_finite(bounds: Iterable[float]) -> bool:
    """Say whether values between these bounds, read on the host, are finite and not huge."""
    return all(abs(bound) <= _HUGE for bound in bounds)


def all_finite(values: Iterable[object]) -> bool:
    """Say whether all floating-point tensors are finite and not huge; the host waits once."""
    return are_finite(bounds(values).tolist())


def nonfinite_rows(logits: Tensor) -> list[int]:
    """Return the rows that are not finite, read on the host."""
    return [row for row, finite in enumerate(logits.isfinite().all(dim=1).tolist()) if not finite]


def nonfinite_as_zeros(logits: Tensor) -> Tensor:
    """Replace rows that are not finite by zeros."""
    return torch.where(logits.isfinite().all(dim=1, keepdim=True), logits, torch.zeros_like(logits))
