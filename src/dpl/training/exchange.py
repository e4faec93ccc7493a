"""What passes between the processes inside a forward pass, with the way back for gradients.

A tensor is either parted (each process has its own rows of a batch) or whole (all have the same). In parted regions
gradients are carried as many times too large as there are processes, in whole ones as they are; so the mean over the
processes is the gradient of the whole batch for every parameter, wherever it is used, and for one that is used in both.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from dpl.training.team import Team

__all__ = ["collect", "part", "unite"]


class _Unite(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: Tensor, team: Team, count: int) -> Tensor:
        ctx.team, ctx.count = team, count
        return team.join(own, team.sizes(count))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return ctx.team.size * gradient[ctx.team.rows(ctx.count)], None, None


class _Part(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: Tensor, team: Team) -> Tensor:
        ctx.team, ctx.count = team, len(whole)
        return whole[team.rows(len(whole))].clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.team.join(gradient, ctx.team.sizes(ctx.count)) / ctx.team.size, None


class _Collect(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: Tensor, team: Team) -> Tensor:
        ctx.team = team
        return team.join(own[None], [1] * team.size)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.team.add(gradient)[ctx.team.rank], None


def unite(own: Tensor, team: Team, count: int) -> Tensor:
    """Parted to whole: return all `count` rows."""
    return _Unite.apply(own, team, count)  # type: ignore[no-any-return, no-untyped-call]


def part(whole: Tensor, team: Team) -> Tensor:
    """Whole to parted: return this process's rows."""
    return _Part.apply(whole, team)  # type: ignore[no-any-return, no-untyped-call]


def collect(own: Tensor, team: Team) -> Tensor:
    """Parted to parted: return every process's tensor, [processes, ...]; all of them may use all of it."""
    return _Collect.apply(own, team)  # type: ignore[no-any-return, no-untyped-call]
