"""`dpl recommend`: is the default method better than the source model on a folder of images, and which parts matter?"""

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import dpl
from dpl.cli.adapt import add_order_arguments, prepare
from dpl.cli.console import print_json, progress
from dpl.cli.models import add_model_arguments, count, read_images
from dpl.core.errors import DataError
from dpl.estimate import WORSE, Estimate
from dpl.model.adaptive import DEFAULT_METHOD
from dpl.runs.folder import FolderRun

__all__ = ["add_arguments", "run"]

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
    calibrate = None
    if args.calibrate is not None:
        calibrate = read_images("--calibrate", args.calibrate, folder.transform, args.limit, folder.names)
    whole = dpl.adapt(network, calibrate=calibrate, estimate=True)
    parts = {part: dpl.adapt(network, **without) for part, without in _PARTS.items()}
    answers = _answers({"source": dpl.adapt(network, "source"), "whole": whole, **parts}, folder, args)
    chosen = _choice(answers, whole.estimate())
    if args.json:
        print_json(chosen)
        return
    flags = "".join(f" --set {name}={value}" for name, value in chosen["settings"].items())
    print(*chosen["why"], f"by hand: {chosen['call']}", sep="\n")
    print(f"     or: dpl adapt --method {chosen['method']}{flags} ...")


def _answers(models: Mapping[str, dpl.AdaptiveModel], folder: FolderRun, args: argparse.Namespace) -> dict[str, Tensor]:
    """Return the classes that each model predicts."""
    answers: dict[str, list[Tensor]] = {name: [] for name in models}
    with progress("recommend", min(args.limit, len(folder.images)), quiet=args.json) as advance:
        for batch in folder.batches(stop=args.limit):
            for name, model in models.items() if len(batch) else ():
                answers[name].append(model(batch.images.to(model.device)).argmax(dim=1).cpu())
            advance(sum(map(len, answers["source"])), "")
    if not answers["source"]:
        raise DataError("--images: none of the images could be read")
    return {name: torch.cat(found) for name, found in answers.items()}


def _choice(answers: dict[str, Tensor], estimate: Estimate) -> dict[str, Any]:
    """Return the default method with the parts that matter, or the source model, and the reasons as sentences."""
    changed = {part: float((answers[part] != answers["whole"]).float().mean()) for part in _PARTS}
    agreement = float((answers["whole"] == answers["source"]).float().mean())
    images, settings = len(answers["source"]), dict[str, Any]()
    why = [
        f"estimate of {DEFAULT_METHOD}: {estimate}",
        f"{DEFAULT_METHOD} agrees with the source model on {agreement:.1%} of {images} images",
    ]
    for part, share in changed.items():
        if share < _MATTERS:
            settings |= _PARTS[part]
        why.append(f"{part}: {share:.1%} of the predictions changed by it{'; left out' if share < _MATTERS else ''}")
    method, settings = ("source", {}) if estimate.verdict == WORSE else (DEFAULT_METHOD, settings)
    arguments = "".join(f", {name}={value!r}" for name, value in settings.items())
    return {
        "images": images, "agreement": agreement, "changed": changed, "estimate": estimate.as_dict(), "method": method,
        "settings": settings, "why": why, "call": f"dpl.adapt(model, {method!r}{arguments})",
    }  # fmt: skip
