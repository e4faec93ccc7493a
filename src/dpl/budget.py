"""Adaptation within a budget of time: from which layer on to learn, and from how many of the batches.

A step costs about three forward passes where all parameters train. Learning behind a late layer only is cheaper: what
lies before it runs without a graph and nothing is propagated back through it. If even the last layer costs too much,
only every k-th batch is learnt from. The costs are measured on the first batch, in units of the source's inference.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import nn

from dpl.errors import SettingError

__all__ = ["Choice", "check_budget", "fit", "later_stages"]


@dataclass(frozen=True)
class Choice:
    """What fits the budget: the module at which learning starts, how many batches share a step, and the cost."""

    start: str | None
    interval: int
    cost: float  # measured, in units of source inference


def check_budget(budget: float | None) -> float | None:
    """Return a valid budget, or say what one is."""
    if budget is not None and not (isinstance(budget, (int, float)) and budget > 1):
        raise SettingError(
            f"budget={budget!r}: expected a number above 1, the cost of a batch in units of the source's inference "
            "(1.5 allows half as much again)"
        )
    return budget


def fit(budget: float, starts: Sequence[str], cost_from: Callable[[str | None], float]) -> Choice:
    """Return the earliest start that fits, found by bisection; if none does, the last one, on fewer of the batches.

    `cost_from(start)` measures a step that learns from there on; `starts` are in the order of the network.
    """
    candidates: list[str | None] = [None, *starts]
    first, last = 0, len(candidates)  # the answer lies in between: costs fall from start to start
    costs = [math.inf] * len(candidates)
    while first < last:
        middle = 0 if last - first == len(candidates) else (first + last) // 2
        costs[middle] = cost_from(candidates[middle])
        first, last = (first, middle) if costs[middle] <= budget else (middle + 1, last)
    if first < len(candidates):
        return Choice(candidates[first], 1, costs[first])
    interval = math.ceil((costs[-1] - 1) / (budget - 1))
    return Choice(candidates[-1], interval, 1 + (costs[-1] - 1) / interval)


def later_stages(module: nn.Module, start: str | None = None) -> list[str]:
    """Return the names of the parts of a network after the first (or after `start`), in the order of definition.

    Parts are the children with parameters; containers of several (stages, blocks) count as their members, and
    wrappers around one child as that child.
    """
    parts = _parts(module, "")
    while len(parts) == 1 and any(True for _ in module.get_submodule(parts[0]).children()):
        parts = _parts(module.get_submodule(parts[0]), f"{parts[0]}.")
    begin = next((i for i, name in enumerate(parts) if start and f".{name}".endswith(f".{start}")), 0)
    return parts[begin + 1 :]


def _parts(module: nn.Module, prefix: str) -> list[str]:
    names = []
    for name, child in module.named_children():
        if isinstance(child, (nn.Sequential, nn.ModuleList)) and not prefix.count(".") and _is_container(child):
            names += _parts(child, f"{prefix}{name}.")
        elif any(True for _ in child.parameters()):
            names.append(f"{prefix}{name}")
    return names


def _is_container(child: nn.Module) -> bool:
    """Say whether the members are stages of their own, not the few layers of one."""
    return sum(1 for member in child.children() if any(True for _ in member.children())) > 2
