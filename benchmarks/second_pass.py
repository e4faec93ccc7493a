"""How many samples may be selected before a second pass over them costs more than a graph over the whole batch.

    python benchmarks/second_pass.py --networks resnet18 mobilenet_v2

For each network and scope, PL runs with `second_pass="never"` and `"always"`, in turns in one process, while a growing
share of the batch is confident. A ratio above 1 means that the second pass costs more.
"""

import argparse
import time

import torch
from speed.networks import SUBJECTS, confident, make_images, make_network
from torch import Tensor

import dpl
from dpl.core.allocator import keep_freed_memory

SHARES = (0.25, 0.5, 0.625, 0.75, 1.0)


def main() -> None:
    """Print one line for each network and scope."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--networks", nargs="+", default=["resnet18", "mobilenet_v2"], choices=list(SUBJECTS))
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=4)
    args = parser.parse_args()
    keep_freed_memory()
    print("| network | scope | " + " | ".join(f"{share:g}" for share in SHARES) + " |")
    for key in args.networks:
        images = make_images(SUBJECTS[key])[: args.batch]
        net = make_network(SUBJECTS[key], images)
        for scope in ("all", "affine"):
            ratios = []
            for share in SHARES:
                alpha = confident(net, images, share)
                forms = [
                    dpl.adapt(net, "pl", confidence=alpha, scope=scope, lr=1e-9, second_pass=form)
                    for form in ("never", "always")
                ]
                once, twice = best_times(forms, images, args.rounds)
                ratios.append(twice / once)
            print(f"| {key} | {scope} | " + " | ".join(f"{ratio:.2f}" for ratio in ratios) + " |", flush=True)


def best_times(models: list[dpl.AdaptiveModel], images: Tensor, rounds: int) -> list[float]:
    """Return the best seconds of a step of each model, measured in turns."""
    best = [float("inf")] * len(models)
    for round_number in range(rounds + 1):
        for place, model in enumerate(models):
            begun = time.perf_counter()
            model(images)
            if round_number > 0:  # the first step confirms the network and allocates
                best[place] = min(best[place], time.perf_counter() - begun)
    return best


if __name__ == "__main__":
    torch.manual_seed(0)
    main()
