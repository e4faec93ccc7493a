"""A private copy of the caller's network."""

import copy
from typing import Any

from torch import Tensor, nn

__all__ = ["private_copy"]


def private_copy(module: nn.Module) -> nn.Module:
    """Deep-copy `module`, including weight-normed layers whose computed weight refuses to be copied."""
    memo: dict[int, Any] = {}
    for child in module.modules():
        for value in vars(child).values():
            if isinstance(value, Tensor) and not value.is_leaf:  # recomputed at each forward
                memo[id(value)] = value.detach().clone()
    return copy.deepcopy(module, memo)
