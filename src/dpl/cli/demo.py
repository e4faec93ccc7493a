"""`dpl demo`: source, PL, TENT, DPL and the default on the same stream of digits, offline, in a minute or two."""

import argparse
import itertools
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from dpl.cli.console import print_json, print_table, progress
from dpl.cli.models import count
from dpl.demo.digits import load_source_network, uci_digits
from dpl.model.adaptive import DEFAULT_METHOD, adapt
from dpl.reproduce.plotting import axes, draw_runs
from dpl.runs.online import OnlineResult, evaluate

TARGET_IMAGES = 1797
BATCH_SIZE = 32
_SKIPPED = 32  # images at the beginning, where the mean over a handful says nothing

# Everything but the loss is the same for PL and DPL: all parameters, running statistics, Adam 1e-4, alpha 0.9.
METHODS: dict[str, dict[str, Any]] = {
    "source": {},
    "pl": {"lr": 1e-4},
    "tent": {},
    "dpl": {"lr": 1e-4},
    DEFAULT_METHOD: {},
}

Results = Mapping[str, Sequence[OnlineResult]]  # by method, one for each order of the stream


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add = parser.add_argument
    add("--out", type=Path, default=Path("dpl-demo.png"), help="picture to write (default: %(default)s)")
    add("--seeds", type=count, default=3, help="random orders of the stream (default: %(default)s)")


def run(args: argparse.Namespace) -> None:
    """Run the demo and print its table."""
    network, accuracy = load_source_network()
    if not args.json:
        print(f"Source: a small residual network, {accuracy:.1f} % on MNIST digits it has not seen.")
        print(f"Target: {TARGET_IMAGES:,} UCI digits, unlabelled, in {args.seeds} random orders of batches of 32.\n")
    batches = itertools.count(1)
    with progress("adapting", len(METHODS) * args.seeds * ceil(TARGET_IMAGES / BATCH_SIZE), args.json) as advance:

        def on_batch(method: str, result: OnlineResult) -> None:
            advance(next(batches), f"{method}: {result.accuracy:.1f} % so far")

        results = run_demo(network, args.seeds, on_batch)
    picture = write_picture(results, args.out)
    figures = {method: summary(own) for method, own in results.items()}
    if args.json:
        facts = [{"method": m} | {name: round(value, 2) for name, value in own.items()} for m, own in figures.items()]
        print_json({"source_accuracy": accuracy, "methods": facts, "picture": str(picture)})
        return
    table = [
        [method, *(f"{value:.1f}" for value in own.values()), f"{own['accuracy'] - figures['source']['accuracy']:+.1f}"]
        for method, own in figures.items()
    ]
    print_table(["method", "accuracy %", "range", "last 400 images %", "ms/image", "vs source"], table)
    print(f"\nOnline accuracy: each batch is predicted before the model adapts to it. Picture: {picture}")


def run_demo(network: nn.Module, seeds: int, on_batch: Callable[[str, OnlineResult], None]) -> Results:
    """Stream the target digits in `seeds` random orders through every method, each time from the source model."""
    images, labels = uci_digits()
    found: dict[str, list[OnlineResult]] = {}
    for method, settings in METHODS.items():
        model, found[method] = adapt(network, method, **settings), []
        for seed in range(seeds):
            model.reset()
            order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
            stream = ((images[batch], labels[batch]) for batch in torch.split(order, BATCH_SIZE))
            found[method].append(evaluate(model, stream, partial(on_batch, method)))
    return found


def summary(results: Sequence[OnlineResult]) -> dict[str, float]:
    """Return means over the orders of the stream, in percent, and the time of an image in milliseconds."""
    accuracies = [result.accuracy for result in results]
    return {
        "accuracy": float(np.mean(accuracies)),
        "accuracy_range": float(np.ptp(accuracies)),
        "last_400": float(np.mean([result.tail(400) for result in results])),
        "ms_per_image": 1000 * sum(r.seconds for r in results) / sum(len(r.labels) for r in results),
    }


def write_picture(results: Results, path: Path) -> Path:
    """Draw cumulative accuracy over the stream: the mean over orders as a line, their range as a band."""
    figure, grid = axes()
    curves = {method: [result.cumulative()[_SKIPPED:] for result in own] for method, own in results.items()}
    draw_runs(grid[0][0], curves, {}, start=_SKIPPED + 1)
    grid[0][0].set(xlabel="images seen", ylabel="cumulative accuracy (%)")
    count = len(results["source"])
    figure.suptitle(f"Trained on MNIST, streaming UCI digits: mean and range of {count} orders", fontsize=10)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    return path
