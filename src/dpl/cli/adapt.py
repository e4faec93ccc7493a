"""`dpl adapt`: a folder of images and a model in, predictions (and a snapshot of the adapted model) out."""

import argparse
import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from dpl.adapter import DEFAULT_METHOD
from dpl.cli.console import print_json, progress, warn
from dpl.errors import DataError, SettingError

if TYPE_CHECKING:
    from torch import nn

    from dpl.data import ImageSet
    from dpl.data.transforms import Evaluation
    from dpl.folderjob import FolderJob, FolderResult

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument(
        "--model",
        required=True,
        metavar="NAME_OR_FILE",
        help="network name (timm's, torchvision/..., our own), or weights",
    )
    parser.add_argument(
        "--network", metavar="NAME", help="architecture, where --model is a weight file that does not say"
    )
    parser.add_argument("--weights", type=Path, help="weight file for a named network (.safetensors, .pth)")
    parser.add_argument("--pretrained", action="store_true", help="let timm or torchvision fetch their own weights")
    parser.add_argument("--images", required=True, type=Path, help="folder of images; sub-folders are taken as classes")
    parser.add_argument("--classes", type=Path, help="class names in the network's order, one a line")
    parser.add_argument("--method", default=DEFAULT_METHOD, help="see dpl list (default: %(default)s)")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a setting of the method")
    parser.add_argument("--out", type=Path, default=Path("predictions.csv"), help="default: %(default)s")
    parser.add_argument("--snapshot", type=Path, help="folder for the adapted model; makes the job resumable")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--size", type=int, help="image size in pixels (default: the network's)")
    parser.add_argument("--order", choices=("auto", "sorted", "shuffled"), default="auto",
                        help="auto: by name for a flat folder, shuffled for class folders")  # fmt: skip
    parser.add_argument("--seed", type=int, default=0, help="seed of the order (default: %(default)s)")
    parser.add_argument("--device", default="auto", help="cpu, cuda, ... (default: a GPU if there is one)")
    parser.add_argument("--workers", type=int, default=2, help="threads that read images (default: %(default)s)")


def run(args: argparse.Namespace) -> None:
    """Run the job and print what came out."""
    import dpl
    from dpl.folderjob import run_folder

    if args.batch_size < 1:
        raise SettingError(f"--batch-size {args.batch_size}: expected at least 1")
    network, job = _prepare(args)
    model = dpl.adapt(network, args.method, **_settings(args.set))
    with progress(args.method, len(job.images), quiet=args.json) as advance:

        def on_batch(result: "FolderResult", images: int) -> None:
            advance(images, "" if result.accuracy is None else f"accuracy {result.accuracy:.1f} %")

        result = run_folder(job, model, network, on_batch)
    _print(job, result, args)


def _prepare(args: argparse.Namespace) -> "tuple[nn.Module, FolderJob]":
    from dpl.data import open_folder
    from dpl.folderjob import FolderJob

    record = _training_record(args)
    classes = _class_names(args.classes) or record.get("classes")
    images = open_folder(args.images, classes)
    network, size = _network(args, record, classes)
    flat = not (images.labels >= 0).any()
    images, names = _labels_that_fit(images, classes, network)
    job = FolderJob(
        images=images,
        transform=_transform(args.size or record.get("size") or size, square="size" in record),
        out=args.out,
        names=names,
        snapshot=args.snapshot,
        batch_size=args.batch_size,
        shuffled=not flat if args.order == "auto" else args.order == "shuffled",
        seed=args.seed,
        workers=args.workers,
    )
    return network, job


def _training_record(args: argparse.Namespace) -> dict[str, Any]:
    """Return what `dpl train` wrote beside a weight file: the network's name, its classes and the image size."""
    path = Path(args.model)
    beside = (path if path.is_dir() else path.parent) / "train.json"
    if not path.exists() or not beside.is_file():
        return {}
    try:
        record = json.loads(beside.read_text())
        return {key: record[key] for key in ("network", "classes", "size") if key in record}
    except (ValueError, TypeError) as error:
        raise DataError(f"{beside}: not a training record ({error})") from error


def _class_names(path: Path | None) -> list[str] | None:
    if path is None:
        return None
    names = [line.strip() for line in path.read_text().splitlines() if line.strip()]
    if not names or len(set(names)) != len(names):
        raise DataError(f"--classes {path}: expected one distinct class name a line; found {len(names)} lines")
    return names


def _network(args: argparse.Namespace, record: dict[str, Any], classes: list[str] | None) -> "tuple[nn.Module, int]":
    from dpl.backbones import create

    path = Path(args.model)
    weights, name = args.weights, args.network or args.model
    if path.exists():
        weights = path / "best.safetensors" if path.is_dir() else path
        name = args.network or record.get("network")
        if name is None:
            raise SettingError(f"--model {path} holds weights only; say which architecture with --network NAME")
    count = len(classes) if classes else _head_size(name, weights) if weights is not None else None
    network = create(name, num_classes=count, weights=weights, pretrained=args.pretrained)
    if weights is None and not args.pretrained:
        warn(f"dpl adapt: {name} has random weights; give --weights FILE (or --pretrained)")
    return network.to(_device(args.device)), _input_size(name, network)


def _head_size(name: str, weights: Path) -> int | None:
    """Return the number of classes that a weight file was trained for; None leaves it to the network's default."""
    from dpl.backbones import create
    from dpl.backbones.checkpoint import read_checkpoint
    from dpl.surgery.split import find_classifier

    head = find_classifier(create(name)).removeprefix("network.")
    sizes = {len(value) for key, value in read_checkpoint(weights).tensors.items() if key.endswith(f"{head}.weight")}
    return sizes.pop() if len(sizes) == 1 else None


def _input_size(name: str, network: "nn.Module") -> int:
    from dpl.backbones import OWN

    if name in OWN:
        return int(OWN[name].input_size)
    for module in network.modules():
        size = (getattr(module, "pretrained_cfg", None) or {}).get("input_size")
        if size:
            return int(size[-1])
    return 224


def _labels_that_fit(
    images: "ImageSet", classes: list[str] | None, network: "nn.Module"
) -> "tuple[ImageSet, tuple[str, ...]]":
    """Take folder names as classes only if there are as many as the network has outputs."""
    from dpl.surgery.split import find_classifier

    outputs = network.get_submodule(find_classifier(network)).out_features
    if classes is not None:
        return images, tuple(classes)
    if len(images.classes) == outputs:
        return images, images.classes
    if images.classes:
        warn(f"dpl adapt: {len(images.classes)} folders but {outputs} classes; no accuracy (name them with --classes)")
    return dataclasses.replace(images, labels=images.labels * 0 - 1), ()


def _transform(size: int, square: bool) -> "Evaluation":
    from dpl.data import resize_crop
    from dpl.data import square as to_square

    return to_square(size) if square or size <= 64 else resize_crop(round(size / 0.875), size)


def _device(name: str) -> str:
    import torch

    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:
        raise SettingError(f"--device {name}: {str(error).splitlines()[0]}") from error
    return name


def _settings(pairs: list[str]) -> dict[str, Any]:
    settings = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals:
            raise SettingError(f"--set {pair}: expected KEY=VALUE, e.g. --set lr=1e-4")
        settings[key] = _value(value)
    return settings


def _value(text: str) -> Any:
    """Read a number (YAML itself does not take 1e-4 for one), true or false, null, or a word."""
    for read in (int, float, yaml.safe_load):
        try:
            return read(text)
        except (ValueError, yaml.YAMLError):
            continue
    return text


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
    if job.snapshot is not None:
        print(f"adapted model: {job.snapshot}")
