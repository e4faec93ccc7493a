"""On which processors our own ways of computing were measured, and found faster than the library's."""

import torch
from torch import Tensor

__all__ = ["was_measured"]

_PROCESSORS = ("AVX2",)


def was_measured(x: Tensor, weight: Tensor) -> bool:
    """Say whether these are multiplied in float32 on such a processor."""
    return (
        x.device.type == "cpu"
        and x.dtype == weight.dtype == torch.float32
        and not torch.is_autocast_enabled("cpu")
        and torch.backends.cpu.get_cpu_capability() in _PROCESSORS
    )
