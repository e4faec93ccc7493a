"""Whether everything is finite, and so small that sums of it are; as few reads on the host as possible."""

from collections.abc import Iterable

import torch
from torch import Tensor

__all__ = ["all_finite", "are_finite", "bounds", "nonfinite_as_zeros", "nonfinite_rows"]

_SMALL = 4096  # values of a tensor; a call for each smaller one would cost more than looking at what is in it
_HUGE = 1e30  # the next sum or square overflows


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
