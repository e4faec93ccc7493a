"""`dpl demo`: run adaptation offline on digits, in a minute or two."""

import argparse
import itertools
from math import ceil
from pathlib import Path

from dpl.cli.console import print_json, print_table, progress
from dpl.cli.models import count
from dpl.demo.digits import load_source_network
from dpl.demo.show import BATCH_SIZE, METHODS, run_demo, summary, write_picture
from dpl.runs.online import OnlineResult

__all__ = ["add_arguments", "run"]

TARGET_IMAGES = 1797


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
    steps = len(METHODS) * args.seeds * ceil(TARGET_IMAGES / BATCH_SIZE)
    batches = itertools.count(1)
    with progress("adapting", steps, quiet=args.json) as advance:

        def on_batch(method: str, result: OnlineResult) -> None:
            advance(next(batches), f"{method}: {result.accuracy:.1f} % so far")

        results = run_demo(network, args.seeds, on_batch)
    picture = write_picture(results, args.out)
    figures = {method: summary(own) for method, own in results.items()}
    if args.json:
        facts = [{"method": m} | {name: round(value, 2) for name, value in own.items()} for m, own in figures.items()]
        print_json({"source_accuracy": accuracy, "methods": facts, "picture": str(picture)})
        return
    source = figures["source"]["accuracy"]
    table = [
        [method, *(f"{value:.1f}" for value in own.values()), f"{own['accuracy'] - source:+.1f}"]
        for method, own in figures.items()
    ]
    print_table(["method", "accuracy %", "range", "last 400 images %", "ms/image", "vs source"], table)
    print(f"\nOnline accuracy: each batch is predicted before the model adapts to it. Picture: {picture}")
