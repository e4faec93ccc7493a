"""Exponential moving averages of weights (teachers), and random restoring of source weights."""

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from dpl.core.errors import InputError

__all__ = ["ema_update", "restore_randomly", "share_frozen"]


@torch.no_grad()
def ema_update(teacher: Iterable[Tensor], student: Iterable[Tensor], momentum: float) -> None:
    """Set teacher <- momentum teacher + (1 - momentum) student, in place.

    The two are walked in parallel (parameters in the same order). A tensor that teacher and student share is
    skipped, and equal values stay exactly equal.
    """
    teachers, students = list(teacher), list(student)
    if [own.shape for own in teachers] != [other.shape for other in students]:
        raise InputError("teacher and student have different parameters; pass those of a network and of its copy")
    pairs = [(own, other) for own, other in zip(teachers, students, strict=True) if own is not other]
    if pairs:
        torch._foreach_lerp_([own for own, _ in pairs], [other for _, other in pairs], 1 - momentum)


@torch.no_grad()
def restore_randomly(
    parameters: Sequence[Tensor], source: Sequence[Tensor], rate: float, generator: torch.Generator
) -> None:
    """Restore each single weight to its source value with probability `rate`, in place.

    One draw on the host covers them all, so it is the same for every device; the mask is the weight of an
    interpolation, which is exact at zero and one.
    """
    if rate == 0 or not parameters:
        return
    sizes = [parameter.numel() for parameter in parameters]
    mask = _hits(sum(sizes), rate, generator, parameters[0].device)
    masks = [part.view_as(p).to(p.dtype) for part, p in zip(mask.split(sizes), parameters, strict=True)]  # type: ignore[no-untyped-call]
    torch._foreach_lerp_(list(parameters), list(source), masks)


def _hits(count: int, rate: float, generator: torch.Generator, device: torch.device) -> Tensor:
    """Return `count` independent zeros and ones, ones with probability `rate`.

    The distance from one hit to the next is geometric, so it is enough to draw the hits: at the usual rate of 1 % a
    hundredth of the random numbers. The number of draws leaves 10 standard deviations of room. Hits beyond the end fall
    on one extra element, which is cut off.
    """
    if rate == 1:
        return torch.ones(count, device=device)
    enough = math.ceil(count * rate + 10 * math.sqrt(count * rate) + 10)
    distances = torch.empty(enough, dtype=torch.int64).geometric_(rate, generator=generator)
    hits = (distances.cumsum(0) - 1).clamp(max=count).to(device, non_blocking=True)
    return torch.zeros(count + 1, device=device).index_fill_(0, hits, 1)[:count]


def share_frozen(teacher: nn.Module, student: nn.Module) -> None:
    """Let a copy of a network use the student's own frozen parameters, so that only trained ones are stored twice."""
    for own, other in zip(teacher.modules(), student.modules(), strict=True):
        for name, parameter in other._parameters.items():
            if parameter is not None and not parameter.requires_grad:
                own._parameters[name] = parameter
