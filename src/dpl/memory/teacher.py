"""Teachers: weights that follow a student's slowly, and weights that are put back at random."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from dpl.errors import InputError

__all__ = ["ema_update", "restore_randomly", "share_frozen"]


@torch.no_grad()
def ema_update(teacher: Iterable[Tensor], student: Iterable[Tensor], momentum: float) -> None:
    """Set teacher <- momentum teacher + (1 - momentum) student, in place.

    The two are walked in parallel (parameters in the same order). A tensor that teacher and student share costs
    nothing, and equal values stay equal to the bit.
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
    """Put each single weight back to its source value with probability `rate`, in place.

    One draw on the parameters' device covers them all; the mask is the weight of an interpolation, which is exact at
    zero and one.
    """
    if rate == 0 or not parameters:
        return
    sizes = [parameter.numel() for parameter in parameters]
    mask = torch.empty(sum(sizes), device=parameters[0].device).bernoulli_(rate, generator=generator)
    masks = [part.view_as(p).to(p.dtype) for part, p in zip(mask.split(sizes), parameters, strict=True)]  # type: ignore[no-untyped-call]
    torch._foreach_lerp_(list(parameters), list(source), masks)


def share_frozen(teacher: nn.Module, student: nn.Module) -> None:
    """Let a copy of a network use the student's own frozen parameters: only what trains exists twice."""
    for own, other in zip(teacher.modules(), student.modules(), strict=True):
        for name, parameter in other._parameters.items():
            if parameter is not None and not parameter.requires_grad:
                own._parameters[name] = parameter
