"""`dpl doctor`: is the environment, the model and its images as adaptation needs them; why figures differ."""

import argparse
import dataclasses
from pathlib import Path
from typing import Any

import torch

from dpl.bench.causes import causes_of_difference
from dpl.cli.console import print_json, print_table
from dpl.cli.models import add_model_arguments, check_counts, images_of, load_source, parse_settings
from dpl.core.allocator import keep_freed_memory
from dpl.core.errors import SettingError
from dpl.core.settings import make_settings
from dpl.methods import get_method
from dpl.runs.doctor import Check, describe_environment, examine

__all__ = ["add_arguments", "run"]

_IMAGES = 16  # enough for a range and a mean, and read in a moment


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add_model_arguments(parser, required=False)
    parser.add_argument("--images", type=Path, metavar="FOLDER",
                        help=f"look at {_IMAGES} of these images, not at noise")  # fmt: skip
    parser.add_argument("--batch-size", type=int, default=32, help="images per batch (default: %(default)s)")
    parser.add_argument("--paper", metavar="FILE", help="experiment file, or a shipped one such as table1: "
                        "show what can make your figures differ from it")  # fmt: skip
    parser.add_argument("--row", metavar="METHOD", help="row of --paper")


def run(args: argparse.Namespace) -> int:
    """Print what was found; return 1 if there is a problem."""
    check_counts(args, "batch_size", "size")
    if args.images is not None and args.model is None:
        raise SettingError("--images: the images are checked with a model; give --model too")
    if (args.paper is None) != (args.row is None):
        raise SettingError("--paper and --row belong together, e.g. --paper table1 --row tent")
    environment = describe_environment(keep_freed_memory())
    checks = [] if args.model is None else _checks(args)
    causes = {} if args.paper is None else causes_of_difference(args.paper, args.row)
    if args.json:
        records = [{**dataclasses.asdict(check), "status": check.status} for check in checks]
        print_json({"environment": environment, "checks": records, "causes": causes})
    else:
        _print(environment, checks, causes)
    return int(any(check.status == "problem" for check in checks))


def _checks(args: argparse.Namespace) -> list[Check]:
    """Examine the model with some images of the folder, or with noise in [0, 1]."""
    network, transform, side = load_source(args)
    kind = get_method(args.method)
    settings = make_settings(kind.settings_class, repr(args.method), parse_settings(args.set))
    noise = torch.rand(_IMAGES, 3, side, side, generator=torch.Generator().manual_seed(0))
    images = noise if args.images is None else images_of(args.images, transform, _IMAGES)
    return examine(network, images.to(next(network.parameters()).device), kind, settings, args.batch_size)


def _print(environment: dict[str, Any], checks: list[Check], causes: dict[str, str]) -> None:
    print_table(["environment", "found"], [[name, str(value)] for name, value in environment.items()])
    if checks:
        print()
        print_table(["check", "result", "found"], [[check.name, check.status, check.found] for check in checks])
    for check in checks:
        if advice := check.problem or check.warning:
            print(f"{check.name}: {advice}")
    if causes:
        print("\nIf your figures differ from this row, compare these nine with your run:")
        print_table(["cause", "this row has"], list(causes.items()))
