"""Convolutions whose backward pass computes only what is needed, on a CPU.

Where a loss selects samples (the confident ones, the reliable ones) and normalisation keeps samples apart, the gradient
of every other sample is zero in every layer. A convolution's backward pass multiplies those zeros like anything else,
twice. The convolutions of the private copy leave them out: each looks at the gradient that reaches it, takes the
samples in which something is not zero, and fills up with zeros. Nothing is assumed about the network or the loss, and
what is left out adds nothing: the gradients are the same.

Also, where a depthwise kernel is larger than its maps (5 x 5 on 4 x 4), the library's gradient of the weights takes
five times as long as sums of shifted products.

On a GPU all is left to the library, as a look at the gradient would make the host wait for it.
"""

from dataclasses import dataclass, field
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import conv2d
from torch.nn.modules.utils import _pair
from torch.overrides import TorchFunctionMode

from dpl.network.norm import NormControl
from dpl.network.subclass import Forward, Subclasses, put_back
from dpl.network.winograd import convolve, suits

__all__ = [
    "Convolutions", "Kept", "install_convolutions", "rows_with_gradient", "take_rows", "unchanged",
    "uninstall_convolutions",
]  # fmt: skip

_SMALL = 5e6  # multiplications of a convolution below which a look costs more than it can save
_DENSE = 12  # multiplications for each value read or written above which leaving samples out pays for their copy
_PROBES = 64  # values of a sample that are looked at first; mostly they already tell that it is not zero
_WORTH = 0.9  # share of samples with a gradient above which all are propagated
Kept = dict[nn.Module, list[tuple[Tensor, int] | None]]  # outputs of each layer's calls, and their version


@dataclass
class Convolutions:
    """What the convolutions of one network share (and its linear layers, see `surgery.linear`)."""

    norm: NormControl  # whose rule tells whether samples meet in a layer
    steady: bool = False  # weights that take no gradient never change
    kept: Kept | None = None  # outputs of the pass that is being kept,
    samples: int = 0  # of so many samples
    answers: Kept | None = None  # the outputs that a repeated pass gets,
    rows: Tensor | None = None  # of these samples
    work: list[int] = field(default_factory=lambda: [0, 0])  # multiplications of the kept pass: not kept, kept

    @property
    def told(self) -> bool:
        """Say whether outputs are to be kept or given."""
        return self.kept is not None or self.answers is not None

    @property
    def plain(self) -> bool:
        """Say whether weights are steady, no sample will be left out, and no output is kept or given."""
        return self.steady and not (self.told or (torch.is_grad_enabled() and self.norm.keeps_samples_apart))

    def keep(self, layer: nn.Module, output: Tensor, work: int, learns: bool) -> None:
        """Keep an output, if a pass is being kept, it belongs to what learns, and it has a row for each sample.

        A layer may be called several times in a pass, so what is not kept leaves a gap.
        """
        if self.kept is None:
            return
        apart = learns and len(output) == self.samples
        if work >= _SMALL:
            self.work[apart] += work
        output_kept = (output.detach(), output._version) if apart and work >= _SMALL else None
        self.kept.setdefault(layer, []).append(output_kept)

    def answer(self, layer: nn.Module) -> Tensor | None:
        """Return the next answer for a layer, if there is one."""
        waiting = None if self.answers is None else self.answers.get(layer)
        given = unchanged(waiting.pop(0)) if waiting else None
        return None if given is None or self.rows is None else take_rows(given, self.rows)


def unchanged(output: tuple[Tensor, int] | None) -> Tensor | None:
    """Return an output that was kept, unless something that works in place has overwritten it since."""
    return output[0] if output is not None and output[0]._version == output[1] else None


def install_convolutions(module: nn.Module, norm: NormControl | None = None) -> Convolutions:
    """Let the convolutions below `module` leave out samples without a gradient; return what they share."""
    shared = Convolutions(norm or NormControl())
    for layer in list(module.modules()):
        if isinstance(layer, nn.Conv2d):
            _sparse.take(layer, convolutions=shared)
    return shared


def uninstall_convolutions(module: nn.Module) -> None:
    """Give every convolution its own class back."""
    for layer in module.modules():
        if isinstance(layer, nn.Conv2d):
            put_back(layer, "convolutions")


def _make_forward(original: type[nn.Module]) -> Forward:
    usual = original.forward is nn.Conv2d.forward

    def forward(self: Any, x: Tensor) -> Tensor:
        if usual and self.convolutions.plain and suits(self, x):
            return convolve(x, self.weight, self.bias)
        if not torch.is_grad_enabled() or x.device.type != "cpu" or torch.is_autocast_enabled("cpu"):
            return original.forward(self, x)  # type: ignore[no-any-return]
        with _OurConvolution(self):  # whatever the layer does before, to its input or to its weights
            return original.forward(self, x)  # type: ignore[no-any-return]

    return forward


_sparse = Subclasses(_make_forward)


class _OurConvolution(TorchFunctionMode):
    """Take a layer's calls of `conv2d` over."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.layer, self.shared = layer, layer.convolutions

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return (self.convolve if func is conv2d else func)(*args, **(kwargs or {}))

    def convolve(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        groups: int = 1,
    ) -> Tensor:
        """Convolve with a backward pass of our own, where it may pay."""
        if isinstance(padding, str) or x.ndim != 4 or len(x) < 2:
            return conv2d(x, weight, bias, stride, padding, dilation, groups)
        geometry = (_pair(stride), _pair(padding), _pair(dilation), groups)
        given = self.shared.answer(self.layer)
        if given is not None:
            return _Convolution.apply(x, weight, bias, geometry, given, False)  # type: ignore[no-any-return, no-untyped-call]
        work, values = _work_and_values(x, weight, geometry)
        learns = x.requires_grad or weight.requires_grad
        apart = self.shared.norm.keeps_samples_apart
        helped = apart or (groups == len(weight) and weight.requires_grad)  # by leaving samples out, or by shifts
        ours = learns and helped and work >= _SMALL and work >= _DENSE * values
        output: Tensor = (
            _Convolution.apply(x, weight, bias, geometry, None, apart)  # type: ignore[no-untyped-call]
            if ours
            else conv2d(x, weight, bias, *geometry)
        )
        self.shared.keep(self.layer, output, work, learns)
        return output


def _work_and_values(x: Tensor, weight: Tensor, geometry: tuple[Any, ...]) -> tuple[int, int]:
    """Return the multiplications of a convolution, and the values that it reads and writes."""
    places = len(x) * x.shape[2] * x.shape[3] // (geometry[0][0] * geometry[0][1])
    return places * weight.numel(), x.numel() + places * len(weight)


class _Convolution(torch.autograd.Function):
    """A convolution (or its output, if that is known) whose backward pass leaves out samples without a gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        geometry: tuple[Any, ...],
        given: Tensor | None,
        sparse: bool,
    ) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, weight)
        ctx.geometry, ctx.biased, ctx.sparse = geometry, bias is not None, sparse
        return conv2d(x, weight, bias, *geometry) if given is None else given

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        (x, weight), (gradient,) = ctx.saved_tensors, grads
        if gradient is None:
            return (None,) * 6
        count = len(gradient)
        look = ctx.sparse and not torch.is_grad_enabled()  # a second derivative needs all samples
        rows = rows_with_gradient(gradient) if look else None
        if rows is not None:
            x, gradient = take_rows(x, rows), take_rows(gradient, rows)
        to_x, to_weight, to_bias = _gradients(gradient, x, weight, ctx.geometry, ctx.needs_input_grad, ctx.biased)
        if rows is not None and to_x is not None:
            to_x = _fill_up(to_x, rows, count)
        return to_x, to_weight, to_bias, None, None, None


def _gradients(
    gradient: Tensor, x: Tensor, weight: Tensor, geometry: tuple[Any, ...], needs: tuple[bool, ...], biased: bool
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    stride, padding, dilation, groups = geometry
    shifted = needs[1] and groups == weight.shape[0] == x.shape[1] and _kernel_exceeds(gradient, weight, geometry)
    wanted = [needs[0], needs[1] and not shifted, biased and needs[2]]
    found = torch.ops.aten.convolution_backward(
        gradient, x, weight, [len(weight)] if biased else None, stride, padding, dilation, False, [0, 0], groups, wanted
    )
    to_x, to_weight, to_bias = (value if asked else None for value, asked in zip(found, wanted, strict=True))
    return to_x, _by_shifts(gradient, x, weight, padding) if shifted else to_weight, to_bias


def _kernel_exceeds(gradient: Tensor, weight: Tensor, geometry: tuple[Any, ...]) -> bool:
    """Say whether a depthwise kernel is larger than its maps, in the layout and for the strides where that is slow."""
    (down, right), _, dilation, _ = geometry
    plain = down == right == 1 and tuple(dilation) == (1, 1) and _is_channels_last(gradient)
    return plain and weight.shape[2] > gradient.shape[2] and weight.shape[3] > gradient.shape[3]


def _by_shifts(gradient: Tensor, x: Tensor, weight: Tensor, padding: tuple[int, int]) -> Tensor:
    """Return the gradient of depthwise weights: for each place in the kernel, gradient times shifted input, summed."""
    d, x = gradient.permute(0, 2, 3, 1), x.permute(0, 2, 3, 1)
    sums = []
    for i, j in product(range(weight.shape[2]), range(weight.shape[3])):
        (down, moved_down), (right, moved_right) = (
            _overlap(place - framed, d.shape[side], x.shape[side])
            for place, framed, side in zip((i, j), padding, (1, 2), strict=True)
        )
        sums.append((d[:, down, right] * x[:, moved_down, moved_right]).reshape(-1, len(weight)).sum(dim=0))
    return torch.stack(sums, dim=1).view_as(weight)


def _overlap(shift: int, length: int, other: int) -> tuple[slice, slice]:
    """Return where a side of one map lies over that of another which is shifted against it, in terms of either."""
    start = max(0, -shift)
    end = max(start, min(length, other - shift))
    return slice(start, end), slice(start + shift, end + shift)


def rows_with_gradient(gradient: Tensor) -> Tensor | None:
    """Return the indices of the samples whose gradient is not zero, or None if those are nearly all."""
    values = _by_row(gradient)
    alive = _not_zero(values[:, :: max(1, values.shape[1] // _PROBES)])
    if bool(alive.all()):
        return None
    doubtful = (~alive).nonzero()[:, 0]
    alive[doubtful] = _not_zero(values.index_select(0, doubtful))
    rows = alive.nonzero()[:, 0]
    if len(rows) > _WORTH * len(alive):
        return None
    return rows if len(rows) else doubtful[:1]  # a convolution of no sample at all is refused by some libraries


def _not_zero(values: Tensor) -> Tensor:
    return (values.amax(dim=1) != 0) | (values.amin(dim=1) != 0)


def _by_row(maps: Tensor) -> Tensor:
    """Return maps [B, C, H, W] as [B, n], in the order in which they lie in memory."""
    return maps.permute(0, 2, 3, 1).flatten(1) if _is_channels_last(maps) else maps.flatten(1)


def take_rows(maps: Tensor, rows: Tensor) -> Tensor:
    """Return some rows of maps in the same memory layout, which indexing them would copy element by element."""
    taken = _empty_like(maps, len(rows))
    torch.index_select(_by_row(maps), 0, rows, out=_by_row(taken))
    return taken


def _fill_up(maps: Tensor, rows: Tensor, count: int) -> Tensor:
    """Return `count` maps: the given ones at `rows`, zeros elsewhere."""
    full = _empty_like(maps, count).zero_()
    _by_row(full).index_copy_(0, rows, _by_row(maps))
    return full


def _empty_like(maps: Tensor, count: int) -> Tensor:
    layout = torch.channels_last if _is_channels_last(maps) else torch.contiguous_format
    return torch.empty((count, *maps.shape[1:]), dtype=maps.dtype, device=maps.device, memory_format=layout)


def _is_channels_last(maps: Tensor) -> bool:
    return not maps.is_contiguous() and maps.is_contiguous(memory_format=torch.channels_last)
