"""The memory layout in which a network's convolutions run fastest, found by measurement.

Channels-last is faster for most networks on most machines, up to twice for mobile ones, and slower for a few. So both
are timed once, on the first images, and the choice is kept: values do not change beyond rounding, but the last digits
do, so a snapshot remembers it. Small networks, where the layout matters little and a clock tells nothing, stay as
they are, and so does a network that its owner has already put into channels-last.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from dpl.core.errors import SettingError
from dpl.network.clock import best_seconds

__all__ = ["channels_last", "check_layout", "fastest_layout"]

_LAYOUTS = ("auto", "as_is", "channels_last")
_SMALL = 2e9  # multiplications of a batch below which nothing is measured: they are quick anyway
_ROWS = 8  # images to measure with
_MARGIN = 1.03  # channels-last may lose by this factor: with more images than are measured it does better
_ROUNDS = 3
_known: dict[tuple[object, ...], str] = {}  # the same network and images get the same answer in one process


def check_layout(layout: str) -> str:
    """Return a valid layout, or say which there are."""
    if layout not in _LAYOUTS:
        raise SettingError(f"layout={layout!r}: expected one of {', '.join(map(repr, _LAYOUTS))}")
    return layout


def channels_last(value: Tensor) -> Tensor:
    """Put the weights of a convolution, or images, into channels-last; leave everything else."""
    return value.contiguous(memory_format=torch.channels_last) if value.ndim == 4 else value


def fastest_layout(module: nn.Module, run: Callable[[Tensor], None], images: Tensor, rule: object = None) -> str:
    """Return "channels_last" or "as_is": the layout of `module` in which `run` (a pass or a step) is faster.

    What is known from an earlier measurement holds for the same `rule` of normalisation.
    """
    convolutions = [layer for layer in module.modules() if isinstance(layer, nn.Conv2d)]
    if images.ndim != 4 or not convolutions or _already(convolutions):
        return "as_is"
    trained = sum(p.numel() for p in module.parameters() if p.requires_grad)
    work = _multiplications(module, images[:1]) * len(images)
    if work < _SMALL:
        return "as_is"
    like = (work, len(convolutions), trained, rule)
    key = (*like, images.shape, images.dtype, images.device, torch.get_num_threads())
    if key not in _known:
        _known[key] = _measured(module, run, images[:_ROWS])
    return _known[key]


def _already(convolutions: list[nn.Conv2d]) -> bool:
    """Say whether somebody chose channels-last before (1 x 1 kernels are in both layouts)."""
    weights = [layer.weight for layer in convolutions if layer.weight[0, 0].numel() > 1 and layer.weight.shape[1] > 1]
    return any(not weight.is_contiguous() for weight in weights)


@torch.no_grad()
def _multiplications(module: nn.Module, image: Tensor) -> int:
    """Return how many multiplications the convolutions need for one image."""
    total = 0

    def count(layer: nn.Conv2d, _inputs: object, output: Tensor) -> None:
        nonlocal total
        total += output[0].numel() * layer.weight[0].numel()

    handles = [m.register_forward_hook(count) for m in module.modules() if isinstance(m, nn.Conv2d)]
    try:
        module(image)
    finally:
        for handle in handles:
            handle.remove()
    return total


def _measured(module: nn.Module, run: Callable[[Tensor], None], images: Tensor) -> str:
    """Time both layouts in turns: what else the machine does then meets both, and the best times tell."""
    best = {"as_is": math.inf, "channels_last": math.inf}
    try:
        for _ in range(_ROUNDS):
            for layout, put in (("channels_last", channels_last), ("as_is", Tensor.contiguous)):
                module._apply(put)  # type: ignore[no-untyped-call]
                best[layout] = min(best[layout], best_seconds(lambda: run(images), images.device, runs=1))
    finally:
        module._apply(Tensor.contiguous)  # type: ignore[no-untyped-call]
    return "channels_last" if best["channels_last"] < best["as_is"] * _MARGIN else "as_is"
