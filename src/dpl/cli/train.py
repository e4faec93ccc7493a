"""`dpl train`: a source model by DomainBed's protocol, resumable to the step."""

import argparse
import dataclasses
import os
from typing import Any

from dpl.cli.console import print_json, print_table, progress
from dpl.training import StepReport, TrainResult, TrainSpec, train

__all__ = ["add_arguments", "run"]

_DEFAULTS: dict[str, Any] = {field.name: field.default for field in dataclasses.fields(TrainSpec)}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("--data", required=True, metavar="DIR", help="folder in which the benchmark lies")
    parser.add_argument("--out", required=True, metavar="DIR", help="folder of the run; an unfinished one goes on")
    parser.add_argument("--dataset", required=True, help="PACS, VLCS, OfficeHome, TerraIncognita, DomainNet-126 ...")
    domain = parser.add_mutually_exclusive_group(required=True)
    domain.add_argument("--target", metavar="DOMAIN", help="domain to leave out; all others are trained on")
    domain.add_argument("--source", metavar="DOMAIN", help="the only domain to train on")
    parser.add_argument("--network", default=_DEFAULTS["network"], help="name of the network (default: %(default)s)")
    parser.add_argument("--weights", metavar="FILE", help="checkpoint to start from (default: random weights)")
    _add_numbers(parser)
    parser.add_argument("--save-every", type=int, metavar="STEPS", help="save every so many steps (as --eval-every)")
    parser.add_argument("--workers", type=int, default=2, metavar="N", help="threads that read images (%(default)s)")
    parser.add_argument("--cache", metavar="DIR", help="keep decoded images here (all must have one size)")
    parser.add_argument("--device", help="cpu, cuda ... (default: cuda where there is one)")


def _add_numbers(parser: argparse.ArgumentParser) -> None:
    meanings = {
        "size": "side of the images in pixels",
        "steps": "number of updates",
        "lr": "learning rate of Adam",
        "per-domain": "images of each source domain in a batch",
        "eval-every": "validate every so many steps",
        "max-val": "validate on at most so many images of each domain (all)",
        "seed": "decides batches, augmentation and the initial head",
        "trial-seed": "decides the split into training and validation images",
    }
    for name, meaning in meanings.items():
        default = _DEFAULTS[name.replace("-", "_")]
        shown = meaning if default is None else f"{meaning} ({default})"
        parser.add_argument(f"--{name}", type=float if name == "lr" else int, default=default, metavar="N", help=shown)


def run(args: argparse.Namespace) -> None:
    """Train, then print what was kept."""
    spec = TrainSpec(**{name: getattr(args, name) for name in _DEFAULTS})
    helps = int(os.environ.get("RANK", "0")) > 0  # one of several processes that torchrun started: the first one tells
    with progress("training", spec.steps, quiet=args.json or helps) as advance:
        done = 0

        def on_step(report: StepReport) -> None:
            nonlocal done
            validated = "" if report.mean is None else f", validation {report.mean:.1f} %"
            advance(report.step + 1 - done, note=f"loss {report.loss:.3f}{validated}")  # the first one jumps ahead
            done = report.step + 1

        result = train(
            spec, data=args.data, out=args.out, on_step=on_step, workers=args.workers, cache=args.cache,
            save_every=args.save_every, device=args.device,
        )  # fmt: skip
    if not helps:
        _print(result, args.json)


def _print(result: TrainResult, as_json: bool) -> None:
    if as_json:
        record = dataclasses.asdict(result) | {"weights": str(result.weights)}
        print_json(record)
        return
    rows = [[domain, f"{accuracy:.1f}"] for domain, accuracy in result.validation.items()]
    rows.append(["mean", f"{result.mean:.1f}"])
    print_table(["source domain", "validation accuracy, %"], rows, title=f"Best after step {result.step}")
    print(f"\nWeights: {result.weights}")
