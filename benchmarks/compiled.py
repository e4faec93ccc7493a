"""Does `torch.compile` make a step of TENT's kind, or inference, cheaper? Processor time of one thread, in turns.

python benchmarks/compiled.py [NETWORK ...]

Compiling takes minutes and a C++ compiler.
"""

import sys
import time
from collections.abc import Callable

import torch
from speed.networks import SUBJECTS, make_images, make_network
from speed.usual import train_affine, use_batch_statistics

from dpl.core.allocator import keep_freed_memory
from dpl.network.layout import channels_last

ROUNDS = 4


def main() -> None:
    """Print a line for each network."""
    keep_freed_memory()
    torch.set_num_threads(1)
    for key in sys.argv[1:] or ("resnet18", "efficientnet_lite0", "vit_small"):
        subject = SUBJECTS[key]
        images = make_images(subject).contiguous(memory_format=torch.channels_last)
        net = make_network(subject, images)._apply(channels_last)
        train_affine(net)
        use_batch_statistics(net)
        ways = {"eager": net, "compiled": torch.compile(net)}
        began = time.perf_counter()
        for way in ways.values():
            step(way, images)
            infer(way, images)
        compiling = time.perf_counter() - began
        gains = " ".join(f"{run.__name__} {gain(run, ways, images):.2f}" for run in (step, infer))
        print(f"{key}: eager / compiled {gains}; {compiling:.0f} s to compile", flush=True)


def step(net: Callable[[torch.Tensor], torch.Tensor], images: torch.Tensor) -> None:
    """Forward and backward."""
    net(images).logsumexp(dim=1).mean().backward()


def infer(net: Callable[[torch.Tensor], torch.Tensor], images: torch.Tensor) -> None:
    """Forward alone."""
    with torch.no_grad():
        net(images)


def gain(run: Callable[..., None], ways: dict[str, Callable[..., torch.Tensor]], images: torch.Tensor) -> float:
    """Return the best time of the eager network over that of the compiled one."""
    best = dict.fromkeys(ways, float("inf"))
    for _ in range(ROUNDS):
        for name, way in ways.items():
            for _ in range(2):
                began = time.process_time()
                run(way, images)
                best[name] = min(best[name], time.process_time() - began)
    return best["eager"] / best["compiled"]


if __name__ == "__main__":
    main()
