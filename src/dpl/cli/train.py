"""`dpl train`: train a source model by DomainBed's protocol; a stopped run resumes."""

import argparse
import dataclasses
import os
from typing import Any

from dpl.cli.console import print_json, print_table, progress
from dpl.core.settings import describe
from dpl.training import StepReport, TrainResult, TrainSpec, train

__all__ = ["add_arguments", "run"]

_SETTINGS = [field.name for field in dataclasses.fields(TrainSpec)]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("--data", required=True, metavar="DIR", help="folder that contains the benchmark")
    parser.add_argument("--out", required=True, metavar="DIR", help="folder of the run; an unfinished run resumes")
    parser.add_argument("--dataset", required=True, help="PACS, VLCS, OfficeHome, TerraIncognita, DomainNet-126 ...")
    domain = parser.add_mutually_exclusive_group(required=True)
    for name, default, meaning in describe(TrainSpec):
        if name in ("target", "source"):
            domain.add_argument(f"--{name}", metavar="DOMAIN", help=meaning)
        elif name != "dataset":
            _add_setting(parser, name, default, meaning)
    parser.add_argument("--save-every", type=int, metavar="N", help="steps between saves (default: as --eval-every)")
    parser.add_argument("--workers", type=int, default=2, metavar="N",
                        help="threads that read images (default: %(default)s)")  # fmt: skip
    parser.add_argument("--cache", metavar="DIR", help="folder for decoded images; all must have one size")
    parser.add_argument("--device", help="cpu, cuda or cuda:N (default: a GPU if there is one)")


def _add_setting(parser: argparse.ArgumentParser, name: str, default: Any, meaning: str) -> None:
    kinds: dict[str, Any] = {"network": str, "weights": str, "lr": float}
    shown = meaning if default is None else f"{meaning} (default: %(default)s)"
    metavar = {"network": "NAME", "weights": "FILE"}.get(name, "N")
    option = f"--{name.replace('_', '-')}"
    parser.add_argument(option, type=kinds.get(name, int), default=default, metavar=metavar, help=shown)


def run(args: argparse.Namespace) -> None:
    """Train, then print the best validation accuracy."""
    spec = TrainSpec(**{name: getattr(args, name) for name in _SETTINGS})
    silent = int(os.environ.get("RANK", "0")) > 0  # of several processes that torchrun started only the first prints
    with progress("training", spec.steps, quiet=args.json or silent) as advance:

        def on_step(report: StepReport) -> None:
            validated = "" if report.mean is None else f", validation {report.mean:.1f} %"
            advance.to(report.step + 1, f"loss {report.loss:.3f}{validated}")  # a resumed run starts ahead

        result = train(
            spec, data=args.data, out=args.out, on_step=on_step, workers=args.workers, cache=args.cache,
            save_every=args.save_every, device=args.device,
        )  # fmt: skip
    if not silent:
        _print(result, args.json)


def _print(result: TrainResult, as_json: bool) -> None:
    if as_json:
        print_json(dataclasses.asdict(result) | {"weights": str(result.weights)})
        return
    rows = [[domain, f"{accuracy:.1f}"] for domain, accuracy in result.validation.items()]
    rows.append(["mean", f"{result.mean:.1f}"])
    print_table(["source domain", "validation accuracy, %"], rows, title=f"Best after step {result.step}")
    print(f"\nWeights: {result.weights}")
