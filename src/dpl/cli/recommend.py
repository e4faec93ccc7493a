"""`dpl recommend`: which method and settings suit a folder of images, why, and a picture of it."""

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from dpl.cli.adapt import prepare
from dpl.cli.console import print_json, print_table, progress, warn
from dpl.cli.models import add_model_arguments
from dpl.core.errors import DataError, SettingError

if TYPE_CHECKING:
    from torch import Tensor

    from dpl.auto import Recommendation
    from dpl.cli.console import Advance
    from dpl.runs.folder import FolderJob

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add_model_arguments(parser, adapting=False)
    parser.add_argument("--images", required=True, type=Path, help="folder of images from where the model is to run")
    parser.add_argument("--calibrate", type=Path, help="folder of source validation images: they improve the choice")
    parser.add_argument("--out", type=Path, default=Path("recommend.png"), help="the picture (default: %(default)s)")
    parser.add_argument("--limit", type=int, default=640, help="images to look at, at most (default: %(default)s)")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--order", choices=("auto", "sorted", "shuffled"), default="auto",
                        help="auto: by name for a flat folder, shuffled for class folders")  # fmt: skip
    parser.add_argument("--seed", type=int, default=0, help="seed of the order (default: %(default)s)")
    parser.add_argument("--workers", type=int, default=2, help="threads that read images (default: %(default)s)")
    parser.set_defaults(snapshot=None, with_source=False)


def run(args: argparse.Namespace) -> None:
    """Look at the images, print the choice and draw it."""
    from dpl.runs.recommend import draw, recommend

    for name in ("limit", "batch_size"):
        if getattr(args, name) < 1:
            raise SettingError(f"--{name.replace('_', '-')} {getattr(args, name)}: expected at least 1")
    network, job = prepare(args)
    device = next(network.parameters()).device
    calibrate = None if args.calibrate is None else _calibration(args, job)
    with progress("recommend", min(args.limit, len(job.images)), quiet=args.json) as advance:
        stream = (batch.to(device) for batch in _stream(job, args.limit, advance))
        chosen = recommend(network, stream, calibrate=calibrate)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    _print(chosen, draw(chosen, args.out), args.json)


def _stream(job: "FolderJob", limit: int, advance: "Advance") -> "Iterator[Tensor]":
    from dpl.data import batches

    for batch in batches(job.images, job.order()[:limit], job.transform, job.batch_size, workers=job.workers):
        for path, reason in batch.failed:
            warn(f"skipped {path}: {reason}")
        if len(batch):
            yield batch.images
        advance(len(batch) + len(batch.failed))


def _calibration(args: argparse.Namespace, job: "FolderJob") -> "list[tuple[Tensor, Tensor]]":
    """Read the source validation images, as many as are looked at of the others."""
    from dpl.data import batches, open_folder

    images = open_folder(args.calibrate)
    some = range(0, len(images), max(1, len(images) // args.limit))
    read = list(batches(images, list(some), job.transform, job.batch_size, workers=job.workers))
    if not any(len(batch) for batch in read):
        raise DataError(f"--calibrate {args.calibrate}: no readable image")
    return [(batch.images, batch.labels) for batch in read if len(batch)]


def _print(chosen: "Recommendation", picture: Path, as_json: bool) -> None:
    if as_json:
        print_json(chosen.as_dict() | {"picture": str(picture)})
        return
    print_table(["setting", "value"], [["method", chosen.method], *([k, str(v)] for k, v in chosen.settings.items())])
    for reason in chosen.why:
        print(f"- {reason}")
    flags = "".join(f" --set {name}={value}" for name, value in chosen.settings.items())
    print(f"by hand: {chosen.call}\n     or: dpl adapt --method {chosen.method}{flags} ...\npicture: {picture}")
