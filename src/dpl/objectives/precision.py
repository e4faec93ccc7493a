"""Losses compute in float32 or better, whatever autocast does around them."""

from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec

import torch
from torch import Tensor

__all__ = ["at_least_float32", "full_precision"]

P = ParamSpec("P")


def at_least_float32(tensor: Tensor) -> Tensor:
    """Return half-precision tensors as float32, all others as they are."""
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


def full_precision(loss: Callable[P, Tensor]) -> Callable[P, Tensor]:
    """Run `loss` outside autocast: at tau = 0.01 a bfloat16 cosine would be wrong by 0.4 in the exponent."""

    @wraps(loss)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> Tensor:
        inputs: list[Any] = [*args, *kwargs.values()]
        device = next(value.device.type for value in inputs if isinstance(value, Tensor))
        raised: Any = [at_least_float32(value) if isinstance(value, Tensor) else value for value in inputs]
        with torch.autocast(device, enabled=False):
            return loss(*raised[: len(args)], **dict(zip(kwargs, raised[len(args) :], strict=True)))

    return wrapped
