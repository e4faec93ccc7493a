"""`dpl export`: a snapshot of an adapted model in, a plain network that needs no dpl out."""

import argparse
from pathlib import Path
from typing import get_args

import torch

import dpl
from dpl.cli.console import print_json
from dpl.cli.models import add_model_arguments, load_source, read_images
from dpl.model.export import ExportFormat

_COMPARED = 128  # images


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add = parser.add_argument
    add("--snapshot", required=True, type=Path, metavar="DIR", help="of dpl adapt, model.save or a server's stream")
    add_model_arguments(parser, adapting=False)
    add("--format", choices=get_args(ExportFormat), default="state_dict",
        help="default: %(default)s, a safetensors file with the network's names")  # fmt: skip
    add("--out", type=Path, default=Path("exported"), metavar="PATH",
        help="folder to make, or a .safetensors, .onnx or .pt2 file (default: exported)")  # fmt: skip
    add("--images", type=Path, metavar="DIR",
        help="images of the stream, to compare the exported model with the adapted one")  # fmt: skip


def run(args: argparse.Namespace) -> None:
    """Load the snapshot, export it, and say how well it agrees."""
    source = load_source(args)
    model = dpl.load(args.snapshot, source.network)
    read = read_images("--images", args.images, source.transform, _COMPARED)
    images = None if read is None else torch.cat([batch for batch, _ in read]).to(model.device)
    found = model.export(args.out, args.format, images=images)
    if args.json:
        print_json({**vars(found), "path": str(found.path)})
    else:
        print(found if images is not None else f"{found} - give --images DIR to compare")
