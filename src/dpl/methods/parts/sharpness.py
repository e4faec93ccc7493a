"""Sharpness-aware minimisation: the gradient is taken where the loss is worst nearby.

Foret et al., Sharpness-Aware Minimization for Efficiently Improving Generalization, ICLR 2021.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

__all__ = ["ascended", "sharpness_aware"]


@contextmanager
def ascended(parameters: list[Tensor], loss: Tensor, rho: float) -> Iterator[None]:
    """Inside the block the parameters stand at theta + rho g / |g|, g the gradient of `loss`; then at theta again."""
    gradients = torch.autograd.grad(loss, parameters, allow_unused=True, materialize_grads=True)
    start = [parameter.detach().clone() for parameter in parameters]
    with torch.no_grad():
        length = torch.stack(torch._foreach_norm(gradients)).norm()
        steps = torch._foreach_mul(gradients, rho / (length + 1e-12))
        torch._foreach_add_(parameters, steps)
    try:
        yield
    finally:
        with torch.no_grad():
            torch._foreach_copy_(parameters, start)


def sharpness_aware(parameters: Sequence[Tensor], first: Tensor, second: Callable[[], Tensor], rho: float) -> Tensor:
    """Return a loss whose gradient at theta is that of `second()` at theta + rho g / |g|, g the gradient of `first`.

    Its value is that of `second()`. An ordinary optimizer step on it is the sharpness-aware one.
    """
    with ascended(list(parameters), first, rho):
        value = second()
        gradients = torch.autograd.grad(value, parameters, allow_unused=True, materialize_grads=True)
    # Each difference is zero; its gradient is one.
    terms = [((p - p.detach()) * gradient).sum() for p, gradient in zip(parameters, gradients, strict=True)]
    return value.detach() + torch.stack(terms).sum()
