"""3 x 3 convolutions of frozen weights by Winograd's minimal filtering, where the processor's library lacks it.

Four neighbouring outputs of a 3 x 3 kernel need 36 multiplications; F(2 x 2, 3 x 3) of Lavin and Gray (Fast Algorithms
for Convolutional Neural Networks, CVPR 2016) needs 16, after sums and differences of the inputs and before sums of the
products. Those pay from 128 channels on. The gradient of the inputs is the same kind of convolution, with the kernel
turned: in the transformed kernel, first and last place of each direction change. Rounding errors are smaller than the
library's, as fewer products are summed.

A transformed kernel takes 16/9 of the weights' memory; it is made once, and again if somebody changes the weights.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from torch.utils.weak import WeakIdKeyDictionary

from dpl.network.processor import was_measured

__all__ = ["convolve", "suits"]

_CHANNELS = 128  # from which on the sums pay
_TILES = 128  # below, reading the larger kernel costs what the multiplications save
_AT_ONCE = 1 << 23  # values of transformed tiles: their memory stays small, and much of it in the cache
_FORWARD, _BACKWARD = (0, 1, 2, 3), (3, 1, 2, 0)  # where the four places of a direction are kept
_kernels = WeakIdKeyDictionary()  # weights: what tells whether they are the same, and the transformed kernel


def suits(layer: nn.Conv2d, x: Tensor) -> bool:
    """Say whether `convolve` can do what this layer does, and faster."""
    weight, bias = layer.weight, layer.bias
    geometry = (layer.kernel_size, layer.stride, layer.padding, layer.dilation, layer.groups, layer.padding_mode)
    if geometry != ((3, 3), (1, 1), (1, 1), (1, 1), 1, "zeros") or min(weight.shape[:2]) < _CHANNELS:
        return False
    frozen = not (weight.requires_grad or weight.is_inference() or (bias is not None and bias.requires_grad))
    tiles = x.numel() // max(4 * x.shape[1], 1)
    return (
        frozen
        and x.ndim == 4
        and was_measured(x, weight)
        and x.is_contiguous(memory_format=torch.channels_last)
        and tiles >= _TILES
    )


def convolve(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return the convolution of x [N, C, H, W] with a 3 x 3 kernel [K, C, 3, 3], padded by one; channels-last."""
    output: Tensor = _Winograd.apply(x, _kernel_of(weight), _FORWARD)  # type: ignore[no-untyped-call]
    return output if bias is None else output + bias[:, None, None]


def _kernel_of(weight: Tensor) -> Tensor:
    same = (weight._version, weight.data_ptr())
    known: tuple[tuple[int, int], Tensor] | None = _kernels.get(weight)  # type: ignore[no-untyped-call]
    if known is None or known[0] != same:
        with torch.inference_mode(False), torch.no_grad():
            known = (same, transformed(weight))
        _kernels[weight] = known
    return known[1]


def transformed(weight: Tensor) -> Tensor:
    """Return a kernel [K, C, 3, 3] as [16, C, K], one matrix for each place of a transformed tile."""
    places = [[1.0, 0.0, 0.0], [0.5, 0.5, 0.5], [0.5, -0.5, 0.5], [0.0, 0.0, 1.0]]
    spread = torch.tensor(places, dtype=torch.float64, device=weight.device)
    kernel = torch.einsum("ia,kcab,jb->ijck", spread, weight.detach().double(), spread)
    return kernel.reshape(16, weight.shape[1], weight.shape[0]).to(weight.dtype).contiguous()


class _Winograd(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, kernel: Tensor, order: tuple[int, ...]) -> Tensor:
        ctx.kernel, ctx.order = kernel, order
        return _filtered(x.permute(0, 2, 3, 1), kernel, order).permute(0, 3, 1, 2)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        other = _BACKWARD if ctx.order == _FORWARD else _FORWARD
        return _Winograd.apply(grads[0], ctx.kernel.transpose(1, 2), other), None, None  # type: ignore[no-untyped-call]


def _filtered(x: Tensor, kernel: Tensor, order: tuple[int, ...]) -> Tensor:
    """Return maps [N, H, W, C] filtered by a transformed kernel [16, C, K], as [N, H, W, K]."""
    count, height, width, channels = x.shape
    down, right = (height + 1) // 2, (width + 1) // 2
    output = x.new_empty(count, down, 2, right, 2, kernel.shape[2])
    at_once = max(1, _AT_ONCE // (16 * down * right * max(channels, kernel.shape[2])))
    for maps, into in zip(torch.split(x, at_once), torch.split(output, at_once), strict=True):
        framed = pad(maps, (0, 0, 1, 1 + width % 2, 1, 1 + height % 2))
        _filter_tiles(framed, kernel, order, into.permute(2, 4, 0, 1, 3, 5))
    return output.view(count, 2 * down, 2 * right, -1)[:, :height, :width].contiguous()


def _filter_tiles(framed: Tensor, kernel: Tensor, order: tuple[int, ...], into: Tensor) -> None:
    """Filter maps that have a frame; `into` [2, 2, N, H/2, W/2, K] gets the four outputs of each tile."""
    _, _, count, down, right, outputs = into.shape
    strips = framed.new_empty(4, count, down, *framed.shape[2:])
    _spread([framed[:, i : i + 2 * down - 1 : 2] for i in range(4)], [strips[i] for i in order])
    tiles = framed.new_empty(4, 4, count, down, right, framed.shape[3])
    _spread([strips[:, :, :, i : i + 2 * right - 1 : 2] for i in range(4)], [tiles[:, i] for i in order])
    products = torch.bmm(tiles.view(16, -1, framed.shape[3]), kernel).view(4, 4, count, down, right, outputs)
    halves = framed.new_empty(2, *products.shape[1:])
    _gather([products[i] for i in order], [halves[0], halves[1]])
    _gather([halves[:, i] for i in order], [into[:, 0], into[:, 1]])


def _spread(four: Sequence[Tensor], into: Sequence[Tensor]) -> None:
    """Transform four neighbouring values of a direction."""
    a, b, c, d = four
    torch.sub(a, c, out=into[0])
    torch.add(b, c, out=into[1])
    torch.sub(c, b, out=into[2])
    torch.sub(b, d, out=into[3])


def _gather(four: Sequence[Tensor], into: Sequence[Tensor]) -> None:
    """Sum four products of a direction up to two neighbouring outputs."""
    a, b, c, d = four
    torch.add(a, b, out=into[0]).add_(c)
    torch.sub(b, c, out=into[1]).sub_(d)
