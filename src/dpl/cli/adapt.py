"""`dpl adapt`: a folder of images and a model in, predictions (and a snapshot of the adapted model) out."""

import argparse
import dataclasses
from pathlib import Path

from torch import nn

import dpl
from dpl.cli.console import print_json, progress, warn
from dpl.cli.models import SourceModel, adaptation, add_adaptation_arguments, count, load_source, read_settings
from dpl.data import ImageSet, open_folder
from dpl.estimate import Estimate
from dpl.network.split import find_classifier
from dpl.runs.folder import FolderResult, FolderRun, out_of_memory_says, run_folder

_UNREAD = (".heic", ".heif", ".avif")
_NO_ROOM = "memory ran out before the first batch: use a smaller --model, or fewer images in --source and --calibrate"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add_adaptation_arguments(parser)
    add = parser.add_argument
    add("--images", required=True, type=Path, help="folder of images; sub-folders are taken as classes")
    add("--out", type=Path, default=Path("predictions.csv"), help="default: %(default)s")
    add("--snapshot", type=Path, help="folder for the adapted model; makes the run resumable")
    add("--save-every", type=count, default=20, metavar="N", help="batches between snapshots (default: %(default)s)")
    add_order_arguments(parser)
    add("--with-source", action="store_true", help="also predict with the source model; dpl report compares both")


def add_order_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options for reading the images: the size of batches, their order, threads."""
    add = parser.add_argument
    add("--batch-size", type=count, default=32, help="images per batch (default: %(default)s)")
    add("--order", choices=("auto", "sorted", "shuffled"), default="auto", help="auto: class folders are shuffled")
    add("--seed", type=int, default=0, help="seed of the order (default: %(default)s)")
    add("--workers", type=int, default=2, help="threads that read images (default: %(default)s)")


def run(args: argparse.Namespace) -> None:
    """Predict the folder and print what came out."""
    with out_of_memory_says(lambda: _NO_ROOM):
        network, folder_run = prepare(args)
        model = dpl.adapt(network, **adaptation(args, folder_run.transform, folder_run.names, args.batch_size))
    with progress(args.method, len(folder_run.images), quiet=args.json) as advance:

        def on_batch(result: FolderResult) -> None:
            note = "" if result.accuracy is None else f"accuracy {result.accuracy:.1f} %"
            advance(result.position, note)

        result = run_folder(folder_run, model, network, on_batch)
    _print(folder_run, result, args)


def prepare(args: argparse.Namespace) -> tuple[nn.Module, FolderRun]:
    """Return the source network and the run that the options describe."""
    source = load_source(args)
    images = open_folder(args.images, source.classes or None)
    if unread := sum(path.suffix.lower() in _UNREAD for path in args.images.rglob("*")):
        warn(f"dpl adapt: {unread} files ({', '.join(_UNREAD)}) are not read; convert them to JPEG or PNG")
    shuffled = (images.labels >= 0).any() if args.order == "auto" else args.order == "shuffled"
    images, names = _labels_that_fit(images, source)
    facts = {"network": source.name, "images": str(args.images), "folder": str(args.images.resolve())}
    known = {"transform": source.transform, "names": names, "shuffled": bool(shuffled), "facts": facts}
    return source.network, read_settings(args, FolderRun, images=images, **known)


def _labels_that_fit(images: ImageSet, source: SourceModel) -> tuple[ImageSet, tuple[str, ...]]:
    """Take folder names as classes only if there are as many as the network has outputs."""
    if source.classes:
        return images, source.classes
    outputs = source.network.get_submodule(find_classifier(source.network)).out_features
    if len(images.classes) == outputs:
        return images, images.classes
    if images.classes:
        warn(f"dpl adapt: {len(images.classes)} folders but {outputs} classes; no accuracy (name them with --classes)")
    return dataclasses.replace(images, labels=images.labels * 0 - 1), ()


def _print(folder_run: FolderRun, result: FolderResult, args: argparse.Namespace) -> None:
    for path, reason in result.failed:
        warn(f"skipped {path}: {reason}")
    if args.json:
        print_json({**result.parts()[0], "accuracy": result.accuracy, "out": str(folder_run.out)})
        return
    print(f"{result.images} images predicted, {result.updates} updates in {result.batches} batches -> {folder_run.out}")
    if result.resumed:
        print(f"resumed: the first {result.resumed} were predicted by an earlier run")
    if result.accuracy is not None:
        print(f"online accuracy {result.accuracy:.2f} % ({result.correct} of {result.labelled}; method {args.method})")
    if result.estimate is not None:
        print(f"estimated accuracy without labels: {Estimate(**result.estimate)}")
    print(f"guard: {_guarded(result)}")
    if folder_run.snapshot is not None:
        print(f"adapted model: {folder_run.snapshot}")


def _guarded(result: FolderResult) -> str:
    """Say what the guard did."""
    if result.guard is None:
        return "off"
    actions = ", ".join(f"{action} {times}" for action, times in result.guard.items() if times)
    by_source = f"; the source model predicted {result.by_source} of {result.images} images" if result.by_source else ""
    return (actions or "nothing to do") + by_source
