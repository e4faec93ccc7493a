"""`dpl adapt`: a folder of images and a model in, predictions (and a snapshot of the adapted model) out."""

import argparse
import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

from dpl.cli.console import print_json, progress, warn
from dpl.cli.models import (
    add_model_arguments,
    class_names,
    evaluation_transform,
    parse_settings,
    source_network,
    training_record,
)
from dpl.cli.progress import board_of
from dpl.core.errors import SettingError

if TYPE_CHECKING:
    from torch import nn

    from dpl.data import ImageSet
    from dpl.runs.folder import FolderJob, FolderResult

__all__ = ["add_arguments", "prepare", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add_model_arguments(parser)
    parser.add_argument("--images", required=True, type=Path, help="folder of images; sub-folders are taken as classes")
    parser.add_argument("--out", type=Path, default=Path("predictions.csv"), help="default: %(default)s")
    parser.add_argument("--snapshot", type=Path, help="folder for the adapted model; makes the job resumable")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--order", choices=("auto", "sorted", "shuffled"), default="auto",
                        help="auto: by name for a flat folder, shuffled for class folders")  # fmt: skip
    parser.add_argument("--seed", type=int, default=0, help="seed of the order (default: %(default)s)")
    parser.add_argument("--no-guard", action="store_true",
                        help="adapt without the guard, which keeps harm against the source model small")  # fmt: skip
    parser.add_argument("--guard-set", action="append", default=[], metavar="KEY=VALUE", help="a setting of the guard")
    parser.add_argument("--with-source", action="store_true",
                        help="also predict with the source model, unadapted: dpl report compares the two")  # fmt: skip
    parser.add_argument("--tensorboard", type=Path, metavar="DIR", help="write TensorBoard scalars there")
    parser.add_argument("--workers", type=int, default=2, help="threads that read images (default: %(default)s)")


def run(args: argparse.Namespace) -> None:
    """Run the job and print what came out."""
    import dpl
    from dpl.runs.folder import run_folder

    if args.batch_size < 1:
        raise SettingError(f"--batch-size {args.batch_size}: expected at least 1")
    network, job = prepare(args)
    guard = False if args.no_guard else parse_settings(args.guard_set)
    model = dpl.adapt(network, args.method, guard=guard, **parse_settings(args.set))
    with progress(args.method, len(job.images), quiet=args.json) as advance, board_of(args.tensorboard) as board:

        def on_batch(result: "FolderResult", images: int) -> None:
            advance(images, "" if result.accuracy is None else f"accuracy {result.accuracy:.1f} %")
            if board is not None and result.latest:
                accuracy = {} if result.accuracy is None else {"accuracy": result.accuracy}
                board.write(f"{args.method} on {args.images.name}", result.images, accuracy | result.latest)

        result = run_folder(job, model, network, on_batch)
    _print(job, result, args)


def prepare(args: argparse.Namespace) -> "tuple[nn.Module, FolderJob]":
    """Return the source network and the job that the options describe."""
    from dpl.data import open_folder
    from dpl.runs.folder import FolderJob

    record = training_record(args)
    classes = class_names(args.classes) or record.get("classes")
    images = open_folder(args.images, classes)
    network, size = source_network(args, record, classes)
    flat = not (images.labels >= 0).any()
    images, names = _labels_that_fit(images, classes, network)
    job = FolderJob(
        images=images,
        transform=evaluation_transform(args.size or record.get("size") or size, square="size" in record),
        out=args.out,
        names=names,
        snapshot=args.snapshot,
        batch_size=args.batch_size,
        shuffled=not flat if args.order == "auto" else args.order == "shuffled",
        seed=args.seed,
        workers=args.workers,
        with_source=args.with_source,
        facts={
            "network": args.network or record.get("network") or args.model,
            "images": str(args.images),
            "folder": str(args.images.resolve()),
        },
    )
    return network, job


def _labels_that_fit(
    images: "ImageSet", classes: list[str] | None, network: "nn.Module"
) -> "tuple[ImageSet, tuple[str, ...]]":
    """Take folder names as classes only if there are as many as the network has outputs."""
    from dpl.network.split import find_classifier

    outputs = network.get_submodule(find_classifier(network)).out_features
    if classes is not None:
        return images, tuple(classes)
    if len(images.classes) == outputs:
        return images, images.classes
    if images.classes:
        warn(f"dpl adapt: {len(images.classes)} folders but {outputs} classes; no accuracy (name them with --classes)")
    return dataclasses.replace(images, labels=images.labels * 0 - 1), ()


def _print(job: "FolderJob", result: "FolderResult", args: argparse.Namespace) -> None:
    for path, reason in result.failed:
        warn(f"skipped {path}: {reason}")
    if args.json:
        print_json({**dataclasses.asdict(result), "accuracy": result.accuracy, "out": str(job.out)})
        return
    print(f"{result.images} images predicted, {result.updates} updates in {result.batches} batches -> {job.out}")
    if result.resumed:
        print(f"resumed: the first {result.resumed} were predicted by an earlier run")
    if result.accuracy is not None:
        print(f"online accuracy {result.accuracy:.2f} % ({result.correct} of {result.labelled}; method {args.method})")
    print(f"guard: {_guarded(result)}")
    if job.snapshot is not None:
        print(f"adapted model: {job.snapshot}")


def _guarded(result: "FolderResult") -> str:
    """Say what the guard did."""
    if result.guard is None:
        return "off"
    actions = ", ".join(f"{action} {times}" for action, times in result.guard.items() if times)
    answers = f"; the source model answered {result.by_source} of {result.images} images" if result.by_source else ""
    return (actions or "nothing to do") + answers
