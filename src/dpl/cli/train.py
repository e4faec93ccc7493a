"""`dpl train`: train a source model by DomainBed's protocol; a stopped run resumes."""

import argparse
import dataclasses
import os

from dpl.cli.console import print_json, print_table, progress
from dpl.cli.models import add_settings, read_settings
from dpl.training import TrainSpec, train


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add = parser.add_argument
    add("--data", required=True, metavar="DIR", help="folder that contains the benchmark")
    add("--out", required=True, metavar="DIR", help="folder of the run; an unfinished run resumes")
    add("--dataset", required=True, help="PACS, VLCS, OfficeHome, TerraIncognita, DomainNet-126 ...")
    domain = parser.add_mutually_exclusive_group(required=True)
    domain.add_argument("--target", metavar="DOMAIN", help="domain to leave out; all others are trained on")
    domain.add_argument("--source", metavar="DOMAIN", help="the only domain to train on, instead of a target")
    add_settings(parser, TrainSpec, "dataset", "target", "source")
    add("--workers", type=int, default=2, metavar="N", help="threads that read images (default: %(default)s)")
    add("--device", help="cpu, cuda or cuda:N (default: a GPU if there is one)")


def run(args: argparse.Namespace) -> None:
    """Train, then print the best validation accuracy."""
    spec = read_settings(args, TrainSpec)
    silent = int(os.environ.get("RANK", "0")) > 0  # of several processes that torchrun started only the first prints
    with progress("training", spec.steps, quiet=args.json or silent) as advance:

        def on_step(step: int, loss: float, mean: float) -> None:
            advance(step + 1, f"loss {loss:.3f}, validation {mean:.1f} %")  # a resumed run starts ahead

        result = train(
            spec, data=args.data, out=args.out, on_step=on_step, workers=args.workers, device=args.device
        )  # fmt: skip
    if args.json and not silent:
        print_json(dataclasses.asdict(result) | {"weights": str(result.weights)})
    elif not silent:
        accuracies = {**result.validation, "mean": result.mean}
        rows = [[domain, f"{accuracy:.1f}"] for domain, accuracy in accuracies.items()]
        print_table(["source domain", "validation accuracy, %"], rows, title=f"Best after step {result.step}")
        print(f"\nWeights: {result.weights}")
