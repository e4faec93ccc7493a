"""Linear layers that answer a repeated pass with what they gave the first time (see `surgery.selecting`).

Transformers spend their time in them. Where their weights take no gradient, wide ones over many tokens run as
convolutions of one pixel: the same products, which the library for convolutions spreads better over threads.
Otherwise they are the library's own.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import conv2d, linear
from torch.overrides import TorchFunctionMode

from dpl.network.processor import was_measured
from dpl.network.rows import Convolutions
from dpl.network.subclass import Forward, Subclasses

__all__ = ["install_linear", "multiply"]

_TOKENS, _WIDTH = 1024, 384  # from which on it pays (less loses: Swin at 96 channels, ViT with a single image)


def install_linear(module: nn.Module, shared: Convolutions) -> None:
    """Let the linear layers below `module` take part in the passes that its convolutions keep and repeat."""
    for layer in list(module.modules()):
        if isinstance(layer, nn.Linear):
            _answering.take(layer, convolutions=shared)


def _make_forward(original: type[nn.Module]) -> Forward:
    usual = original.forward is nn.Linear.forward

    def forward(self: Any, x: Tensor) -> Tensor:
        if not self.convolutions.told:
            return multiply(x, self.weight, self.bias) if usual else original.forward(self, x)
        with _OurLinear(self):  # whatever the layer does before, to its input or to its weights
            return original.forward(self, x)  # type: ignore[no-any-return]

    return forward


_answering = Subclasses(_make_forward)


def multiply(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x [..., d] times weight [k, d], plus bias [k], in the way that is faster."""
    if not _suits(x, weight, bias):
        return linear(x, weight, bias)
    tokens = x.view(1, -1, 1, x.shape[-1]).permute(0, 3, 1, 2)
    return conv2d(tokens, weight[:, :, None, None], bias).permute(0, 2, 3, 1).view(*x.shape[:-1], len(weight))


def _suits(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    learns = weight.requires_grad or (bias is not None and bias.requires_grad)  # their gradient is slower so
    return (
        x.ndim > 2
        and x.numel() >= _TOKENS * x.shape[-1]
        and min(weight.shape) >= _WIDTH
        and not (learns and torch.is_grad_enabled())
        and x.is_contiguous()
        and was_measured(x, weight)
    )


class _OurLinear(TorchFunctionMode):
    """Take a layer's calls of `linear` over."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.layer, self.shared = layer, layer.convolutions

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return (self.answer if func is linear else func)(*args, **(kwargs or {}))

    def answer(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Answer from memory, or multiply and remember."""
        given = self.shared.answer(self.layer)
        if given is not None and given.shape[:-1] == input.shape[:-1]:
            return _Linear.apply(input, weight, bias, given)  # type: ignore[no-any-return, no-untyped-call]
        output = multiply(input, weight, bias)
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
