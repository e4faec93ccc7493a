"""`dpl export`: a snapshot of an adapted model in, a plain network that needs no dpl out."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from dpl.cli.console import print_json
from dpl.cli.models import add_model_arguments, class_names, evaluation_transform, source_network, training_record
from dpl.core.errors import DataError
from dpl.model.export import ExportFormat

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["add_arguments", "run"]

_COMPARED = 128  # images


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("--snapshot", required=True, type=Path, metavar="DIR",
                        help="snapshot of dpl adapt, of model.save or of a server's stream")  # fmt: skip
    add_model_arguments(parser, adapting=False)
    parser.add_argument("--format", choices=get_args(ExportFormat), default="state_dict",
                        help="default: %(default)s, a safetensors file with the network's names")  # fmt: skip
    parser.add_argument("--out", type=Path, default=Path("exported"), metavar="PATH",
                        help="folder to make, or a .safetensors, .onnx or .pt2 file (default: exported)")  # fmt: skip
    parser.add_argument("--images", type=Path, metavar="DIR",
                        help="images of the stream, to compare the exported model with the adapted one")  # fmt: skip


def run(args: argparse.Namespace) -> None:
    """Load the snapshot, export it, and say how well it agrees."""
    import dpl

    record = training_record(args)
    classes = class_names(args.classes) or record.get("classes")
    network, size = source_network(args, record, classes)
    model = dpl.load(args.snapshot, network)
    images = None
    if args.images is not None:
        images = _images(args, args.size or record.get("size") or size, square="size" in record).to(model.device)
    found = model.export(args.out, args.format, images=images)
    if args.json:
        print_json({**vars(found), "path": str(found.path)})
    else:
        print(found if images is not None else f"{found} - give --images DIR to compare")


def _images(args: argparse.Namespace, size: int, square: bool) -> "Tensor":
    """Read some images, spread over the folder."""
    import torch

    from dpl.data import batches, open_folder

    found = open_folder(args.images)
    some = list(range(0, len(found), max(1, len(found) // _COMPARED)))[:_COMPARED]
    read = [batch.images for batch in batches(found, some, evaluation_transform(size, square), 32) if len(batch)]
    if not read:
        raise DataError(f"--images {args.images}: no readable image")
    return torch.cat(read)
