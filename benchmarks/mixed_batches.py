"""Batch statistics in all layers, in early ones or in none: accuracy, and whether a batch is seen to be mixed.

    DPL_DATA=/path/to/data python benchmarks/mixed_batches.py --networks resnet20 resnet56 cifar100

Prints the table of docs/internals/guard.md. `DPL_DATA` is that of benchmarks/estimate_study.py. Batches of 200 images
(50 of CIFAR-100, which has 70 of a class), clean and under nine corruptions, mixed or of few classes. Nothing trains.
"""

import argparse
from collections.abc import Iterator
from typing import Any

import pandas as pd
import torch
from estimate_study import HOME, SEVERITY, as_tensor, forward, load
from torch import Tensor

from dpl.core.numerics import same_class
from dpl.data.corruptions import corrupt
from dpl.methods.parts.norm_rules import ALIKE, BY_CHANCE, BatchStatistics, EarlyBatch, RunningStatistics
from dpl.network.norm_control import install

CORRUPTIONS = ("clean", "gaussian_noise", "speckle_noise", "fog", "snow", "contrast", "pixelate", "jpeg_compression",
               "glass_blur", "motion_blur")  # fmt: skip
RULES = {"source": RunningStatistics(), "early": EarlyBatch(), "batch": BatchStatistics()}
ONE = (0, 3, 5, 6, 8)  # classes that make a batch by themselves; the next one joins for batches of two


def batches(labels: Tensor, size: int) -> Iterator[tuple[str, Tensor]]:
    """Yield the kind of each batch and its images, by their places."""
    order = HOME + torch.randperm(len(labels) - HOME, generator=torch.Generator().manual_seed(0))
    for rows in order[: size * len(ONE)].split(size):
        yield "mixed", rows
    for k in ONE:
        yield "two classes", order[(labels[order] == k) | (labels[order] == k + 1)][:size]
        yield "one class", order[labels[order] == k][:size]


def study(name: str) -> list[dict[str, Any]]:
    """Return a line for each batch: accuracy by rule, and whether it is seen not to be mixed."""
    network, images, labels = load(name)
    control, lines = install(network), []
    for corruption in CORRUPTIONS:
        for kind, rows in batches(labels, 50 if name == "cifar100" else 200):
            pictures = images[rows.numpy()]
            if corruption != "clean":
                pictures = corrupt(pictures, corruption, SEVERITY.get(corruption, 5), start=int(rows[0]))
            logits = {}
            for rule, statistics in RULES.items():
                with control.using(statistics):
                    logits[rule] = forward(network, as_tensor(pictures))
            right = {k: 100 * float((v.argmax(dim=1) == labels[rows]).float().mean()) for k, v in logits.items()}
            early, alike = (float(same_class(logits[rule]).mean()) for rule in ("early", "batch"))
            seen = 100.0 * (early > ALIKE * alike + BY_CHANCE)
            lines.append({"network": name, "kind": kind, "corruption": corruption, **right, "not mixed": seen})
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", nargs="*", default=["resnet20", "resnet56", "cifar100"])
    lines = pd.DataFrame([line for name in parser.parse_args().networks for line in study(name)])
    print("| network | batch | source statistics | early layers | all layers | seen not to be mixed | batches |")
    print("|---|---|---:|---:|---:|---:|---:|")
    for (name, kind), part in lines.groupby(["network", "kind"], sort=False):
        cells = [f"{part[column].mean():.1f}" for column in RULES] + [f"{part['not mixed'].mean():.0f} %"]
        print(f"| {name} | {kind} | {' | '.join(cells)} | {len(part)} |")


if __name__ == "__main__":
    main()
