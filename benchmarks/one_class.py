"""DPL on streams of one class, in class order and mixed, with and without `mixed_only`, on networks that chose nothing.

    DPL_DATA=/path/to/data python benchmarks/one_class.py --networks resnet56 cifar100 wrn28

Prints the second table of docs/results/one_class.md. `DPL_DATA` is that of benchmarks/estimate_study.py. Batches of 8,
source statistics; noise at severity 3, fog at 5 and clean images; all parameters at 5e-5 and affine ones at 1e-3.
"""

import argparse
from collections.abc import Iterator
from typing import Any

import pandas as pd
import torch
from estimate_study import HOME, as_tensor, load
from torch import Tensor

import dpl
from dpl.data.corruptions import corrupt

CONDITIONS = {"clean": 0, "gaussian_noise": 3, "fog": 5}
RATES = {"all": 5e-5, "affine": 1e-3}
IMAGES, BATCH, SEEDS = 600, 8, (1, 2, 3)


def streams(labels: Tensor, seed: int) -> Iterator[tuple[str, Tensor]]:
    """Yield the name of each order and the images in it, by their places."""
    generator = torch.Generator().manual_seed(seed)
    rows = HOME + torch.randperm(len(labels) - HOME, generator=generator)
    rank = torch.randperm(int(labels.max()) + 1, generator=generator)
    mixed = rows[:IMAGES]
    yield "mixed", mixed
    yield "class order", mixed[rank[labels[mixed]].argsort(stable=True)]
    yield "one class", rows[rank[labels[rows]] == 0][:IMAGES]


def study(name: str) -> Iterator[dict[str, Any]]:
    """Yield a line for each stream and scope: what the rule and its absence gain on the source model."""
    network, images, labels = load(name)
    for condition, severity in CONDITIONS.items():
        for seed in SEEDS:
            for order, rows in streams(labels, seed):
                pictures = images[rows.numpy()]
                if severity:
                    pictures = corrupt(pictures, condition, severity, start=int(rows[0]))
                pixels, truth = as_tensor(pictures), labels[rows]
                source = answers(dpl.adapt(network, "source"), pixels)
                for scope, lr in RATES.items():
                    given: dict[str, Any] = {"scope": scope, "lr": lr, "norm": "running", "guard": False}
                    found = {only: answers(dpl.adapt(network, "dpl", mixed_only=only, **given), pixels)
                             for only in (True, False)}  # fmt: skip
                    gains = {only: 100 * float(((a == truth).float() - (source == truth).float()).mean())
                             for only, a in found.items()}  # fmt: skip
                    equal = 100.0 * torch.equal(found[True], found[False])
                    yield {
                        "network": name,
                        "order": order,
                        "with": gains[True],
                        "without": gains[False],
                        "equal": equal,
                    }


def answers(model: dpl.AdaptiveModel, pixels: Tensor) -> Tensor:
    return torch.cat([model(batch).argmax(dim=1) for batch in pixels.split(BATCH)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", nargs="*", default=["resnet56", "cifar100", "wrn28"])
    lines = pd.DataFrame([line for name in parser.parse_args().networks for line in study(name)])
    print("| network | order | streams | with the rule: mean, worst | without: mean, worst | same answers |")
    print("|---|---|---:|---:|---:|---:|")
    for (name, order), part in lines.groupby(["network", "order"], sort=False):
        cells = [f"{part[side].mean():+.1f}, {part[side].min():+.1f}" for side in ("with", "without")]
        print(f"| {name} | {order} | {len(part)} | {' | '.join(cells)} | {part['equal'].mean():.0f} % |")


if __name__ == "__main__":
    main()
