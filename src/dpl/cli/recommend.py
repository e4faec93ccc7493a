"""`dpl recommend`: is the default method better than the source model on a folder of images, and which parts matter?"""

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import dpl
from dpl.cli.adapt import add_order_arguments, prepare
from dpl.cli.console import Advance, print_json, print_table, progress, warn
from dpl.cli.models import add_model_arguments, check_counts, labelled_images
from dpl.core.errors import DataError
from dpl.data import batches
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
    add("--limit", type=int, default=640, help="images to use, at most (default: %(default)s)")
    add_order_arguments(parser)
    parser.set_defaults(out=Path(), snapshot=None, save_every=1, with_source=False)


def run(args: argparse.Namespace) -> None:
    """Run the default method with and without its parts, and print what they change."""
    check_counts(args, "limit", "batch_size")
    network, folder = prepare(args)
    reading = {"limit": args.limit, "batch_size": args.batch_size, "workers": args.workers}
    calibrate = args.calibrate and labelled_images(args.calibrate, folder.transform, folder.names, **reading)
    models = {
        "source": dpl.adapt(network, "source"),
        "whole": dpl.adapt(network, calibrate=calibrate, estimate=True),
        **{part: dpl.adapt(network, **without) for part, without in _PARTS.items()},
    }
    with progress("recommend", min(args.limit, len(folder.images)), quiet=args.json) as advance:
        answers = _answers(models, folder, args.limit, advance)
    chosen = _recommendation(answers, models["whole"].estimate())
    if args.json:
        print_json(chosen)
    else:
        _print(chosen)


def _answers(
    models: Mapping[str, dpl.AdaptiveModel], run: FolderRun, limit: int, advance: Advance
) -> dict[str, Tensor]:
    """Return the classes that each model predicts."""
    answers: dict[str, list[Tensor]] = {name: [] for name in models}
    read = 0
    for batch in batches(run.images, run.order()[:limit], run.transform, run.batch_size, workers=run.workers):
        for path, reason in batch.failed:
            warn(f"skipped {path}: {reason}")
        for name, model in models.items() if len(batch) else ():
            answers[name].append(model(batch.images.to(model.device)).argmax(dim=1).cpu())
        read += len(batch) + len(batch.failed)
        advance(read, "")
    if not answers["source"]:
        raise DataError("--images: none of the images could be read")
    return {name: torch.cat(found) for name, found in answers.items()}


def _recommendation(answers: dict[str, Tensor], estimate: Estimate) -> dict[str, Any]:
    """Return the default method with the parts that matter, or the source model, and the reasons as sentences."""
    source, whole = answers["source"], answers["whole"]

    def share(mask: Tensor) -> float:
        return float(mask.float().mean())

    parts: list[dict[str, Any]] = [
        {"part": part, "without": without, "changed": share(answers[part] != whole),
         "agreement": share(answers[part] == source)}
        for part, without in _PARTS.items()
    ]  # fmt: skip
    method = "source" if estimate.verdict == WORSE else DEFAULT_METHOD
    left_out = [part for part in parts if part["changed"] < _MATTERS]
    settings = {} if method == "source" else {k: v for part in left_out for k, v in part["without"].items()}
    agreement = share(whole == source)
    why = [
        f"estimate of {DEFAULT_METHOD}: {estimate}",
        f"{DEFAULT_METHOD} agrees with the source model on {agreement:.1%} of {len(source)} images",
    ]
    for part in parts:
        ending = "; left out" if part in left_out else ""
        why.append(f"{part['part']}: {part['changed']:.1%} of the predictions changed by it{ending}")
    arguments = "".join(f", {name}={value!r}" for name, value in settings.items())
    return {
        "images": len(source), "agreement": agreement, "parts": parts, "estimate": estimate.as_dict(), "method": method,
        "settings": settings, "why": why, "call": f"dpl.adapt(model, {method!r}{arguments})",
    }  # fmt: skip


def _print(chosen: dict[str, Any]) -> None:
    rows = []
    for part in chosen["parts"]:
        matters = "yes" if part["changed"] >= _MATTERS else "no"
        rows.append([part["part"], f"{part['changed']:.1%}", f"{part['agreement']:.1%}", matters])
    print_table(["part", "predictions changed by it", "as the source without it", "matters"], rows)
    for reason in chosen["why"][:2]:
        print(f"- {reason}")
    flags = "".join(f" --set {name}={value}" for name, value in chosen["settings"].items())
    print(f"by hand: {chosen['call']}\n     or: dpl adapt --method {chosen['method']}{flags} ...")
