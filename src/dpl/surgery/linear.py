"""Linear layers that answer a repeated pass with what they gave the first time (see `surgery.selecting`).

Transformers spend their time in them. Outside such passes they are the library's own.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.overrides import TorchFunctionMode

from dpl.surgery.rows import Convolutions
from dpl.surgery.subclass import Forward, Subclasses

__all__ = ["install_linear"]


def install_linear(module: nn.Module, shared: Convolutions) -> None:
    """Let the linear layers below `module` take part in the passes that its convolutions keep and repeat."""
    for layer in list(module.modules()):
        if isinstance(layer, nn.Linear):
            _answering.take(layer, convolutions=shared)


def _make_forward(original: type[nn.Module]) -> Forward:
    def forward(self: Any, x: Tensor) -> Tensor:
        if not self.convolutions.told:
            return original.forward(self, x)  # type: ignore[no-any-return]
        with _OurLinear(self):  # whatever the layer does before, to its input or to its weights
            return original.forward(self, x)  # type: ignore[no-any-return]

    return forward


_answering = Subclasses(_make_forward)


class _OurLinear(TorchFunctionMode):
    """Take a layer's calls of `linear` over."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.layer, self.shared = layer, layer.convolutions

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return (self.multiply if func is linear else func)(*args, **(kwargs or {}))

    def multiply(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Answer from memory, or multiply and remember."""
        given = self.shared.answer(self.layer)
        if given is not None and given.shape[:-1] == input.shape[:-1]:
            return _Linear.apply(input, weight, bias, given)  # type: ignore[no-any-return, no-untyped-call]
        output = linear(input, weight, bias)
        learns = input.requires_grad or weight.requires_grad
        self.shared.keep(self.layer, output, input.numel() * len(weight), learns)
        return output


class _Linear(torch.autograd.Function):
    """A linear layer whose output is known."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, given: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.biased = bias is not None
        return given

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (x, weight), (gradient,) = ctx.saved_tensors, grads
        needs_x, needs_weight, needs_bias, _ = ctx.needs_input_grad
        flat = gradient.flatten(0, -2)
        return (
            gradient @ weight if needs_x else None,
            flat.T @ x.flatten(0, -2) if needs_weight else None,
            flat.sum(dim=0) if ctx.biased and needs_bias else None,
            None,
        )
