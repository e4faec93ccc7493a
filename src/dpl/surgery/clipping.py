"""Clipped activations (ReLU6) that remember their output instead of a copy of their input.

The gradient passes where the input lies between the bounds, which the output tells as well. The library keeps the
input, so that an activation in place copies it first: one more pass over every map of a mobile network, and twice the
memory.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import hardtanh

from dpl.surgery.subclass import Forward, Subclasses, put_back

__all__ = ["install_clipping", "uninstall_clipping"]


def install_clipping(module: nn.Module) -> None:
    """Let the clipped activations below `module` remember their outputs."""
    for layer in list(module.modules()):
        if isinstance(layer, nn.Hardtanh):
            _remembering.take(layer)


def uninstall_clipping(module: nn.Module) -> None:
    """Give every clipped activation its own class back."""
    for layer in module.modules():
        if isinstance(layer, nn.Hardtanh):
            put_back(layer)


def _make_forward(original: type[nn.Module]) -> Forward:
    plain = original.forward in (nn.Hardtanh.forward, nn.ReLU6.forward)

    def forward(self: Any, x: Tensor) -> Tensor:
        if not plain or not torch.is_grad_enabled() or not x.requires_grad:
            return original.forward(self, x)  # type: ignore[no-any-return]
        return _Clip.apply(x, self.min_val, self.max_val, self.inplace)  # type: ignore[no-any-return, no-untyped-call]

    return forward


_remembering = Subclasses(_make_forward)


class _Clip(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, low: float, high: float, inplace: bool) -> Tensor:
        output = hardtanh(x, low, high, inplace)
        if inplace:
            ctx.mark_dirty(x)
        ctx.save_for_backward(output)
        ctx.bounds = low, high
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        (output,), (gradient,) = ctx.saved_tensors, grads
        return torch.ops.aten.hardtanh_backward(gradient, output, *ctx.bounds), None, None, None
