"""`dpl recommend`: which parts of the default method matter for a folder of images."""

import argparse
from collections.abc import Iterator
from pathlib import Path

from torch import Tensor

from dpl.cli.adapt import add_order_arguments, prepare
from dpl.cli.console import Advance, print_json, print_table, progress, warn
from dpl.cli.models import add_model_arguments, check_counts, labelled_images
from dpl.data import batches
from dpl.runs.folder import FolderRun
from dpl.runs.recommend import Recommendation, recommend

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add_model_arguments(parser, adapting=False)
    parser.add_argument(
        "--images", required=True, type=Path, help="folder of unlabelled images from the target environment"
    )
    parser.add_argument("--calibrate", type=Path, help="folder of labelled source validation images, in class folders")
    parser.add_argument("--limit", type=int, default=640, help="images to use, at most (default: %(default)s)")
    add_order_arguments(parser)
    parser.add_argument("--workers", type=int, default=2, help="threads that read images (default: %(default)s)")
    parser.set_defaults(out=Path(), snapshot=None, save_every=1, with_source=False)


def run(args: argparse.Namespace) -> None:
    """Run the default method with and without its parts, and print what they change."""
    check_counts(args, "limit", "batch_size")
    network, folder_run = prepare(args)
    device = next(network.parameters()).device
    calibrate = None if args.calibrate is None else labelled_images(args.calibrate, folder_run, args.limit)
    with progress("recommend", min(args.limit, len(folder_run.images)), quiet=args.json) as advance:
        stream = (batch.to(device) for batch in _stream(folder_run, args.limit, advance))
        chosen = recommend(network, stream, calibrate=calibrate)
    _print(chosen, args.json)


def _stream(run: FolderRun, limit: int, advance: Advance) -> Iterator[Tensor]:
    for batch in batches(run.images, run.order()[:limit], run.transform, run.batch_size, workers=run.workers):
        for path, reason in batch.failed:
            warn(f"skipped {path}: {reason}")
        if len(batch):
            yield batch.images
        advance(len(batch) + len(batch.failed))


def _print(chosen: Recommendation, as_json: bool) -> None:
    if as_json:
        print_json(chosen.as_dict())
        return
    percent = "{:.1%}".format
    rows = [[part.part, percent(part.changed), percent(part.agreement), "yes" if part.matters else "no"]
            for part in chosen.parts]  # fmt: skip
    print_table(["part", "predictions changed by it", "as the source without it", "matters"], rows)
    for reason in chosen.why[:2]:
        print(f"- {reason}")
    flags = "".join(f" --set {name}={value}" for name, value in chosen.settings.items())
    print(f"by hand: {chosen.call}\n     or: dpl adapt --method {chosen.method}{flags} ...")
