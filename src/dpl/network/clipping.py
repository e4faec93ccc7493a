"""Clipped activations (ReLU6) that remember their output instead of a copy of their input.

The gradient passes where the input lies between the bounds, which the output tells as well. The library keeps the
input, so that an activation in place copies it first: one more pass over every map of a mobile network, and twice the
memory. A network that overwrites such an output later needs the library's way; the first pass that learns shows it.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import hardtanh

from dpl.network.subclass import Forward, Subclasses, put_back

__all__ = ["Clipping"]


class Clipping:
    """The clipped activations of one network, which remember their outputs while nothing overwrites those."""

    def __init__(self, module: nn.Module) -> None:
        self._layers = [layer for layer in module.modules() if isinstance(layer, nn.Hardtanh)]
        self.outputs: list[tuple[Tensor, int]] | None = []  # of the first pass that learns, with their versions
        for layer in self._layers:
            _remembering.take(layer, clipping=self)

    def fails(self) -> bool:
        """Say, after the first pass that learns, whether it overwrote an output; then the layers are as before."""
        if not self.outputs:
            return False
        outputs, self.outputs = self.outputs, None
        overwritten = any(output._version != version for output, version in outputs)
        if overwritten:
            self.remove()
        return overwritten

    def remove(self) -> None:
        """Give every layer its own class back."""
        for layer in self._layers:
            put_back(layer, "clipping")


def _make_forward(original: type[nn.Module]) -> Forward:
    plain = original.forward in (nn.Hardtanh.forward, nn.ReLU6.forward)

    def forward(self: Any, x: Tensor) -> Tensor:
        if not plain or not torch.is_grad_enabled() or not x.requires_grad:
            return original.forward(self, x)  # type: ignore[no-any-return]
        output: Tensor = _Clip.apply(x, self.min_val, self.max_val, self.inplace)  # type: ignore[no-untyped-call]
        if self.clipping.outputs is not None:
            self.clipping.outputs.append((output.detach(), output._version))
        return output

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
