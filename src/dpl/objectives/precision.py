"""Losses compute in float32 or better, whatever autocast does around them."""

from collections.abc import Callable
from functools import wraps
from typing import Concatenate, ParamSpec

import torch
from torch import Tensor

__all__ = ["at_least_float32", "full_precision"]

P = ParamSpec("P")


def at_least_float32(tensor: Tensor) -> Tensor:
    """Return half-precision tensors as float32, all others as they are."""
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


def full_precision(
    loss: Callable[Concatenate[Tensor, P], Tensor],
) -> Callable[Concatenate[Tensor, P], Tensor]:
    """Run `loss` outside autocast: at tau = 0.01 a bfloat16 cosine would be wrong by 0.4 in the exponent."""

    @wraps(loss)
    def wrapped(first: Tensor, *args: P.args, **kwargs: P.kwargs) -> Tensor:
        with torch.autocast(first.device.type, enabled=False):
            return loss(at_least_float32(first), *args, **kwargs)

    return wrapped  # type: ignore[return-value]
