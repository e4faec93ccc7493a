"""The memory layout of a network's convolutions.

Channels-last is faster for most convolutional networks, up to twice for mobile ones. `layout="auto"` follows a fixed
rule, so that two processes agree to the last digit. `layout="timed"` measures both layouts on the first images.
"""

import time

import torch
from torch import Tensor, nn

from dpl.network.network import Network
from dpl.network.norm_control import RunningStatistics
from dpl.network.split import logits_of

__all__ = ["LAYOUTS", "SMALL_SIDE", "channels_last", "choose_layout"]

LAYOUTS = ("auto", "timed", "as_is", "channels_last")
SMALL_SIDE = 64  # pixels; below it the layout hardly matters
_ROUNDS, _IMAGES = 3, 8  # of a measurement


def channels_last(value: Tensor) -> Tensor:
    """Put the weights of a convolution, or images, into channels-last; leave everything else."""
    return value.contiguous(memory_format=torch.channels_last) if value.ndim == 4 else value


def choose_layout(layout: str, network: Network, images: Tensor) -> str:
    """Return the layout that "auto" or "timed" means for these images: by the rule, or the faster one."""
    module, spatial = network.module, _spatial_weights(network.module)
    if images.ndim != 4 or not spatial:
        return "as_is"
    if layout == "auto":  # a network that its owner has put into channels-last stays as it is
        usual = all(weight.is_contiguous() for weight in spatial)
        return "channels_last" if usual and min(images.shape[2:]) >= SMALL_SIDE else "as_is"
    layouts = {"as_is": Tensor.contiguous, "channels_last": channels_last}
    seconds: dict[str, list[float]] = {name: [] for name in layouts}
    try:
        for name in [*layouts] * _ROUNDS:  # in turns, so that other load on the machine affects both
            module._apply(layouts[name])  # type: ignore[no-untyped-call]
            with network.norm.using(RunningStatistics()):
                seconds[name].append(_seconds(module, images[:_IMAGES]))
    finally:
        module._apply(Tensor.contiguous)  # type: ignore[no-untyped-call]
    return min(layouts, key=lambda name: min(seconds[name]))


def _spatial_weights(module: nn.Module) -> list[Tensor]:
    """Return the weights of convolutions with a kernel above 1 x 1 and several channels: only those have a layout."""
    weights = [layer.weight for layer in module.modules() if isinstance(layer, nn.Conv2d)]
    return [weight for weight in weights if weight[0, 0].numel() > 1 and weight.shape[1] > 1]


def _seconds(module: nn.Module, images: Tensor) -> float:
    """Return the time of a second pass (and backward if anything trains): the first chooses kernels and allocates."""
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    for _ in range(2):
        begun = time.perf_counter()
        with torch.set_grad_enabled(bool(trained)):
            logits = logits_of(module(images))
            if trained:
                torch.autograd.grad(logits.float().square().mean(), trained, allow_unused=True)
        if images.is_cuda:
            torch.cuda.synchronize(images.device)
    return time.perf_counter() - begun
