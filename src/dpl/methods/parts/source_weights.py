"""The source values of the trainable parameters, for methods that return to them or stay near them."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from dpl.core.numerics import at_least_float32
from dpl.core.state import Stateful
from dpl.methods.base import GradientMethod

__all__ = ["SourceWeights", "restart"]


class SourceWeights(Stateful):
    """A copy of the source model's trainable parameters.

    It never changes and is made again with the method, so it moves between devices but is no part of a snapshot.
    """

    def __init__(self, parameters: Mapping[str, Parameter]) -> None:
        super().__init__()
        self.names = list(parameters)
        self.parameters: list[Tensor] = list(parameters.values())
        self.values = [parameter.detach().clone() for parameter in self.parameters]

    def named(self) -> dict[str, Tensor]:
        """Return the source values by name."""
        return dict(zip(self.names, self.values, strict=True))

    @torch.no_grad()
    def put_back(self) -> None:
        """Set the parameters to what they were."""
        torch._foreach_copy_(self.parameters, self.values)

    @torch.no_grad()
    def pull(self, share: float) -> None:
        """Move the parameters towards what they were: (1 - share) now + share then."""
        torch._foreach_lerp_(self.parameters, self.values, share)

    @torch.no_grad()
    def shift(self, flat: Tensor) -> None:
        """Add to the parameters what `flat` holds for all of them."""
        parts = torch.split(flat, [parameter.numel() for parameter in self.parameters])
        changes = [part.view_as(now).to(now.dtype) for part, now in zip(parts, self.parameters, strict=True)]
        torch._foreach_add_(self.parameters, changes)

    def displacement(self) -> Tensor:
        """Return how far each parameter is from its start, flat, with gradient."""
        pairs = zip(self.parameters, self.values, strict=True)
        return torch.cat([at_least_float32(now - then).reshape(-1) for now, then in pairs])

    def move(self, transfer: Callable[[Tensor], Tensor]) -> None:
        """Follow the network to another device or dtype."""
        self.values = [transfer(value) for value in self.values]


def restart(method: GradientMethod[Any], source: SourceWeights, *, optimizer: bool = True) -> None:
    """Return a running method to the source model: parameters, added terms and (if asked) the optimizer."""
    source.put_back()
    method.share = 1.0
    if optimizer:
        method.optimizer.restore({})
    for term in method.terms:
        term.restart()
