"""What the automatic choice costs: 100 batches with it, against the preset it chooses, in turns, best of two.

DPL_DATA=... python benchmarks/auto_cost.py
"""

import time

import torch
from auto_streams import cifar
from torch import Tensor, nn

import dpl
from dpl.core.allocator import keep_freed_memory

BATCHES, SIZE = 100, 32


def main() -> None:
    """Print one line for a stream that is learnt from and one for a stream that is left alone."""
    keep_freed_memory()
    for corruption, severity in (("gaussian_noise", 5), (None, 0)):
        network, images, _ = cifar(10, corruption, severity, BATCHES * SIZE)()
        network = network.to(memory_format=torch.channels_last)
        batches = list(images.contiguous(memory_format=torch.channels_last).split(SIZE))
        model = dpl.adapt(network)
        automatic = seconds(model, batches)
        choice = model.method.recommendation()
        preset = dpl.adapt(network, choice.method, **choice.settings)
        fixed = min(seconds(preset, batches), seconds(preset, batches))
        automatic = min(automatic, seconds(model, batches))
        settings = ", ".join(f"{key}={value}" for key, value in choice.settings.items())
        print(f"{corruption or 'clean'}: {choice.method}({settings}); auto {automatic:.1f} s, preset {fixed:.1f} s, "
              f"{100 * (automatic / fixed - 1):+.0f} %")  # fmt: skip


def seconds(model: dpl.AdaptiveModel | nn.Module, batches: list[Tensor]) -> float:
    """Return the processor time of the whole stream from the source on."""
    if isinstance(model, dpl.AdaptiveModel):
        model.reset()
    begun = time.process_time()
    for batch in batches:
        model(batch)
    return time.process_time() - begun


if __name__ == "__main__":
    main()
