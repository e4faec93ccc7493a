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

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("source", type=Path, help="folder of images, or a .npz with 'images' and 'labels'")
    parser.add_argument("target", type=Path, help="folder to write to; a stopped run resumes")
    parser.add_argument("--names", metavar="NAME,...", help="corruptions (default: the usual fifteen)")
    parser.add_argument("--severities", metavar="N,...", help="some of 1 to 5 (default: all; folders only)")
    parser.add_argument("--seed", type=int, default=0, help="seed of all random draws (default: %(default)s)")
    parser.add_argument("--transform", default="unchanged", metavar="TEXT",
                        help="first, as 'resize 256 crop 224' (default: %(default)s; folders only)")  # fmt: skip
    parser.add_argument("--workers", type=int, default=1, help="threads (default: %(default)s; folders only)")


def run(args: argparse.Namespace) -> int:
    """Write the copies and print how many."""
    names = CORRUPTIONS if args.names is None else tuple(args.names.split(","))
    report = _arrays(args, names) if args.source.suffix == ".npz" else _folder(args, names)
    if args.json:
        print_json(report)
    else:
        print("  ".join(f"{name} {value}" for name, value in report.items() if not isinstance(value, dict)))
        for name, reason in report.get("unusable", {}).items():
            warn(f"not used: {name}: {reason}")
    return 1 if report.get("unusable") else 0


def _arrays(args: argparse.Namespace, names: tuple[str, ...]) -> dict[str, Any]:
    for name, usual in (("severities", None), ("transform", "unchanged"), ("workers", 1)):
        if getattr(args, name) != usual:
            raise SettingError(f"--{name} is for folders of images; array files always contain all five severities")
    content = read_npz(args.source)
    with progress("corrupting", len(names), quiet=args.json) as advance:
        paths = corrupt_arrays(
            content["images"], content["labels"].astype(int), args.target, names=names, seed=args.seed,
            progress=lambda done, total: advance.to(done),
        )  # fmt: skip
    return {"files": len(paths), "target": str(args.target)}


def _folder(args: argparse.Namespace, names: tuple[str, ...]) -> dict[str, Any]:
    severities = SEVERITIES if args.severities is None else [_whole(word) for word in args.severities.split(",")]
    count = len(image_names(args.source, recursive=True)) if args.source.is_dir() else 1
    with progress("corrupting", count, quiet=args.json) as advance:
        report = corrupt_folder(
            args.source, args.target, names=names, severities=severities, seed=args.seed,
            transform=make_transform(args.transform), workers=args.workers,
            progress=lambda done, total: advance.to(done),
        )  # fmt: skip
    return {"written": report.written, "present": report.present, "target": str(args.target),
            "unusable": report.unusable}  # fmt: skip


def _whole(word: str) -> int:
    if not word.isdecimal():
        raise SettingError(f"--severities: {word!r}; expected whole numbers from 1 to 5, e.g. 3,5")
    return int(word)
