"""`dpl corrupt`: corrupted copies of clean images, laid out as CIFAR-10-C (arrays) or ImageNet-C (folders)."""

import argparse
from pathlib import Path
from typing import Any

from dpl.cli.console import print_json, progress, warn
from dpl.core.errors import SettingError
from dpl.data.arrays import read_npz
from dpl.data.corruptions import CORRUPTIONS, SEVERITIES, corrupt_arrays, corrupt_folder
from dpl.data.images import image_names
from dpl.data.transforms import make_transform


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add = parser.add_argument
    add("source", type=Path, help="folder of images, or a .npz with 'images' and 'labels'")
    add("target", type=Path, help="folder to write to; a stopped run resumes")
    add("--names", metavar="NAME,...", help="corruptions (default: the usual fifteen)")
    add("--severities", metavar="N,...", help="some of 1 to 5 (default: all; folders only)")
    add("--seed", type=int, default=0, help="seed of all random draws (default: %(default)s)")
    add("--transform", default="unchanged", metavar="TEXT", help="first, as 'resize 256 crop 224'; folders only")
    add("--workers", type=int, default=1, help="threads (default: %(default)s; folders only)")


def run(args: argparse.Namespace) -> int:
    """Write the copies and print how many."""
    common = {"names": CORRUPTIONS if args.names is None else tuple(args.names.split(",")), "seed": args.seed}
    report = _arrays(args, common) if args.source.suffix == ".npz" else _folder(args, common)
    unusable = report.get("unusable", {})
    if args.json:
        print_json(report)
    else:
        print("  ".join(f"{name} {value}" for name, value in report.items() if not isinstance(value, dict)))
        for name, reason in unusable.items():
            warn(f"not used: {name}: {reason}")
    return 1 if unusable else 0


def _arrays(args: argparse.Namespace, common: dict[str, Any]) -> dict[str, Any]:
    for name, usual in (("severities", None), ("transform", "unchanged"), ("workers", 1)):
        if getattr(args, name) != usual:
            raise SettingError(f"--{name} is for folders of images; array files always contain all five severities")
    content = read_npz(args.source)
    with progress("corrupting", len(common["names"]), quiet=args.json) as advance:
        common["progress"] = lambda done, total: advance(done, "")
        paths = corrupt_arrays(content["images"], content["labels"].astype(int), args.target, **common)
    return {"files": len(paths), "target": str(args.target)}


def _folder(args: argparse.Namespace, common: dict[str, Any]) -> dict[str, Any]:
    try:
        severities = SEVERITIES if args.severities is None else [int(word) for word in args.severities.split(",")]
    except ValueError as error:
        raise SettingError(f"--severities {args.severities}: expected whole numbers from 1 to 5, e.g. 3,5") from error
    options = common | {"severities": severities, "transform": make_transform(args.transform), "workers": args.workers}
    count = len(image_names(args.source, recursive=True)) if args.source.is_dir() else 1
    with progress("corrupting", count, quiet=args.json) as advance:
        report = corrupt_folder(args.source, args.target, progress=lambda done, _: advance(done, ""), **options)
    counts = {"written": report.written, "present": report.present}
    return counts | {"target": str(args.target), "unusable": report.unusable}
