"""`dpl recommend`: is the default method better than the source model on a folder of images, and which parts matter?"""

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import dpl
from dpl.cli.adapt import add_order_arguments, prepare
from dpl.cli.console import print_json, print_table, progress
from dpl.cli.models import add_model_arguments, count, read_images
from dpl.core.errors import DataError
from dpl.estimate import WORSE
from dpl.model.adaptive import DEFAULT_METHOD
from dpl.runs.folder import FolderRun

# What takes a part of the default method away.
_PARTS: dict[str, dict[str, Any]] = {
    "batch statistics": {"norm": "running"},
    "learning": {"loss": "none"},
    "answers of the memory": {"answer": "classifier"},
}
_MATTERS = 0.01  # share of predictions that a part must change: one that changes none costs time for nothing


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add_model_arguments(parser, adapting=False)
    add = parser.add_argument
    add("--images", required=True, type=Path, help="folder of unlabelled images from the target environment")
    add("--calibrate", type=Path, help="folder of labelled source validation images, in class folders")
    add("--limit", type=count, default=640, help="images to use, at most (default: %(default)s)")
    add_order_arguments(parser)


def run(args: argparse.Namespace) -> None:
    """Run the default method with and without its parts, and print what they change."""
    network, folder = prepare(args)
    calibrate = read_images("--calibrate", args.calibrate, folder.transform, args.limit, folder.names)
    whole, source = dpl.adapt(network, calibrate=calibrate, estimate=True), dpl.adapt(network, "source")
    parts = {f"without {part}": dpl.adapt(network, **settings) for part, settings in _PARTS.items()}
    images, changed = _changed(whole, {"source model": source, **parts}, folder, args)
    estimate = whole.estimate()
    method, settings = "source" if estimate.verdict == WORSE else DEFAULT_METHOD, dict[str, Any]()
    for part, without in _PARTS.items():
        if method == DEFAULT_METHOD and changed[f"without {part}"] < _MATTERS:
            settings |= without
    if args.json:
        found = {"images": images, "estimate": estimate.as_dict(), "changed": changed}
        print_json({**found, "method": method, "settings": settings})
        return
    print(f"{DEFAULT_METHOD} on {images} images: {estimate}")
    rows = [[name, f"{share:.1%}"] for name, share in changed.items()]
    print_table(["in its place", "predictions that change"], rows)
    print("dpl adapt --method", method, *(f"--set {name}={value}" for name, value in settings.items()), "...")


def _changed(
    whole: dpl.AdaptiveModel, others: Mapping[str, dpl.AdaptiveModel], folder: FolderRun, args: argparse.Namespace
) -> tuple[int, dict[str, float]]:
    """Return the number of images, and what share of them each of the others predicts differently."""
    images, changed = 0, dict.fromkeys(others, 0)
    with progress("recommend", min(args.limit, len(folder.images)), quiet=args.json) as advance:
        for batch in folder.batches(stop=args.limit):
            if len(batch):
                pixels = batch.images.to(whole.device)
                predicted = whole(pixels).argmax(dim=1)
                for name, model in others.items():
                    changed[name] += int((model(pixels).argmax(dim=1) != predicted).sum())
                images += len(batch)
                advance(images, "")
    if not images:
        raise DataError("--images: none of the images could be read")
    return images, {name: count / images for name, count in changed.items()}
