"""Options that commands share, and the network and images that they describe."""

import argparse
import dataclasses
import hashlib
import json
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, get_args

import yaml
from torch import Tensor, nn

from dpl.backbones import OWN, create
from dpl.backbones.pretrained import is_pretrained_folder, pretrained_record
from dpl.backbones.weights import read_checkpoint
from dpl.core.errors import DataError, SettingError
from dpl.core.extras import choose_device, import_modules
from dpl.core.files import file_sha256
from dpl.core.settings import Checked, make_settings
from dpl.data import batches, open_folder, resize_crop
from dpl.data import square as to_square
from dpl.data.transforms import Evaluation
from dpl.methods import get_method
from dpl.model.adaptive import DEFAULT_METHOD
from dpl.network.split import find_classifier

__all__ = [
    "SourceModel", "adaptation", "add_adaptation_arguments", "add_import_argument", "add_model_arguments",
    "add_settings", "count", "digest", "load_source", "parse_settings", "read_images", "read_settings",
]  # fmt: skip

Classes = Collection[str] | None  # of the network, empty if they are not known; None: labels do not matter
_KINDS = (int, float, yaml.safe_load)  # of the values of settings; YAML itself does not take 1e-4 for a number
SOURCE_IMAGES = 5000  # of --source are read, at most: they are kept in memory


class SourceModel(NamedTuple):
    """The network of the options, on its device, and what is known of it."""

    network: nn.Module
    name: str
    transform: Evaluation  # of an image to its input
    size: int  # side of its input in pixels
    classes: tuple[str, ...]  # empty where they are not known


def count(text: str) -> int:
    """Read an option that must be a whole number of at least 1."""
    if not (text.isdecimal() and int(text)):
        raise argparse.ArgumentTypeError(f"{text}: expected a whole number of at least 1")
    return int(text)


def add_settings(parser: argparse._ActionsContainer, kind: type[Checked], *declared: str) -> None:
    """Declare an option for each setting, but for those that are declared already."""
    for field in dataclasses.fields(kind):
        if field.name not in declared:
            default, types = field.default, (field.type, *get_args(field.type))
            number: dict[str, Any] = next(({"type": t, "metavar": "N"} for t in (int, float) if t in types), {})
            choices = get_args(field.type) if default in types else None  # of a Literal
            about = field.metadata["help"] + ("" if default is None else " (default: %(default)s)")
            name = f"--{field.name.replace('_', '-')}"
            parser.add_argument(name, default=default, choices=choices, help=about, **number)


def read_settings(args: argparse.Namespace, kind: type[Any], **others: Any) -> Any:
    """Make settings of the options that have their names, and of others."""
    return kind(**{name: value for name, value in vars(args).items() if name in kind.__dataclass_fields__} | others)


def add_model_arguments(parser: argparse._ActionsContainer, adapting: bool = True, required: bool = True) -> None:
    """Declare the options of the model and, if `adapting`, of the method."""
    add = parser.add_argument
    kinds = "network name (timm, torchvision/NAME, built-in or package.module:build), weight file, or folder written "
    add("--model", required=required, metavar="NAME_OR_FILE", help=f"{kinds}by dpl train or by transformers")
    add("--network", metavar="NAME", help="architecture, if --model is a weight file without a record of dpl train")
    add("--weights", type=Path, help="weight file for a named network (.safetensors, .pth)")
    add("--pretrained", action="store_true", help="let timm or torchvision download their weights")
    add("--random-weights", action="store_true", help="run an untrained network, to try things out")
    add_import_argument(parser)
    add("--classes", type=Path, help="class names in the network's order, one per line")
    if adapting:
        add("--method", default=DEFAULT_METHOD, help="see dpl list (default: %(default)s)")
        add("--set", action="append", default=[], metavar="KEY=VALUE", help="a setting of the method")
    add("--size", type=count, help="image size in pixels (default: the network's)")
    add("--device", default="auto", help="cpu, cuda or cuda:N (default: a GPU if there is one)")


def add_import_argument(parser: argparse._ActionsContainer) -> None:
    """Declare the option for modules that `import_modules` imports."""
    parser.add_argument("--import", dest="imports", action="append", default=[], metavar="MODULE",
                        help="import a module of yours first, which registers methods")  # fmt: skip


def add_adaptation_arguments(parser: argparse._ActionsContainer) -> None:
    """Declare the options of the model and of all that `adaptation` reads."""
    add_model_arguments(parser)
    add = parser.add_argument
    add("--no-guard", action="store_true", help="turn off the guard, which stops adaptation that does harm")
    add("--guard-set", action="append", default=[], metavar="KEY=VALUE", help="a setting of the guard")
    add("--source", type=Path, metavar="FOLDER", help="labelled source images in class folders; some methods need them")
    add("--calibrate", type=Path, metavar="FOLDER",
        help="labelled source validation images in class folders: accuracy is then estimated in percent")  # fmt: skip


def adaptation(
    args: argparse.Namespace, transform: Evaluation, names: Collection[str], batch_size: int = 32
) -> dict[str, Any]:
    """Return the arguments of `dpl.adapt` beside the network; labelled images are in batches of that size."""
    kind = get_method(args.method)
    if args.source is None and kind.info.source != "never":
        raise SettingError(f"--method {args.method} needs labelled source images: give --source FOLDER")
    labelled = {
        option: read_images(f"--{option}", getattr(args, option), transform, limit, names, batch_size)
        for option, limit in (("source", SOURCE_IMAGES), ("calibrate", 1000))
    }
    guard = False if args.no_guard else parse_settings(args.guard_set, "--guard-set", "limit=4")
    settings = parse_settings(args.set)
    make_settings(kind.settings_class, repr(args.method), settings)  # refuses the other arguments of `dpl.adapt`
    return {"method": args.method, "guard": guard, **labelled, **settings}


def load_source(args: argparse.Namespace) -> SourceModel:
    """Return the network of the options and what is known of it."""
    import_modules(args.imports)
    name, weights, record = _place(args)
    classes = record.get("classes") if args.classes is None else _class_names(args.classes)
    outputs = len(classes) if classes else _head_size(name, weights) if weights is not None else None
    network = create(name, num_classes=outputs, weights=weights, pretrained=args.pretrained)
    if weights is None and not (is_pretrained_folder(name) or args.pretrained or args.random_weights):
        raise SettingError(
            f"--model {name} names a network without trained weights: give --weights FILE or --pretrained "
            "(or --random-weights, to try things out)"
        )
    size = args.size or record.get("size") or _input_size(name, network)
    whole = "size" in record or size <= 64  # of small images, and as in training
    transform = to_square(size) if whole else resize_crop(round(size / 0.875), size)
    return SourceModel(network.to(choose_device(args.device)), name, transform, size, tuple(classes or ()))


def _place(args: argparse.Namespace) -> tuple[str, Path | None, dict[str, Any]]:
    """Return the network's name, its weight file, and the size and classes that are recorded beside it."""
    path, name, weights = Path(args.model), args.network or args.model, args.weights
    record: dict[str, Any] = {}
    if path.exists() and not is_pretrained_folder(path):
        weights = path / "best.safetensors" if path.is_dir() else path
        record = _training_record(weights.with_name("train.json"))
        name = args.network or record.get("network")
        if name is None:
            raise SettingError(f"--model {path} contains weights only; name the architecture with --network NAME")
    return name, weights, pretrained_record(Path(name)) if is_pretrained_folder(name) else record


def _training_record(path: Path) -> dict[str, Any]:
    """Return what `dpl train` noted of its network, if it made it."""
    if not path.is_file():
        return {}
    try:
        record = json.loads(path.read_text())
        settings = record["settings"]
        return {"network": settings["network"], "size": settings["size"], "classes": record["data"]["classes"]}
    except (ValueError, TypeError, KeyError) as error:
        raise DataError(f"{path}: not a training record ({error})") from error


def _class_names(path: Path) -> list[str]:
    """Read class names, one per line."""
    try:
        names = [line.strip() for line in path.read_text().splitlines() if line.strip()]
    except UnicodeDecodeError as error:
        raise DataError(f"--classes {path}: expected a text file with one class name per line") from error
    if not names or len(set(names)) != len(names):
        raise DataError(f"--classes {path}: expected one distinct class name per line; found {len(names)} lines")
    return names


def _head_size(name: str, weights: Path) -> int | None:
    """Return the number of classes of a weight file; None if it cannot be found."""
    head = find_classifier(create(name)).removeprefix("network.")
    sizes = {len(value) for key, value in read_checkpoint(weights).items() if key.endswith(f"{head}.weight")}
    return sizes.pop() if len(sizes) == 1 else None


def _input_size(name: str, network: nn.Module) -> int:
    if name in OWN:
        return int(OWN[name].input_size)
    for module in network.modules():
        if size := (getattr(module, "pretrained_cfg", None) or {}).get("input_size"):  # of timm
            return int(size[-1])
        if isinstance(side := getattr(getattr(module, "config", None), "image_size", None), int):  # of transformers
            return side
    return 224


def read_images(
    option: str, folder: Path | None, transform: Evaluation, limit: int, names: Classes = None, batch_size: int = 32
) -> list[tuple[Tensor, Tensor]] | None:
    """Return at most `limit` images of a folder, spread over it, in batches with labels; None without a folder.

    With `names`, the images must be labelled.
    """
    if folder is None:
        return None
    images = open_folder(folder, [*names] if names else None)
    if names is not None and not (images.labels >= 0).any():
        raise DataError(f"{option} {folder}: expected one sub-folder for each class, found images without labels")
    some = _spread(len(images), limit)
    read = batches(images, list(some), transform, batch_size, workers=2)
    readable = [(batch.images, batch.labels) for batch in read if len(batch)]
    if not readable:
        raise DataError(f"{option} {folder}: no readable image among {len(some)}")
    return readable


def _spread(total: int, limit: int) -> range:
    """Return the places of at most `limit` of `total` images, spread over all."""
    return range(0, total, -(-total // limit) or 1)


def digest(folder: Path) -> str:
    """Identify a folder of images by the names of all and the contents of those that are read, wherever it lies."""
    images = open_folder(folder)
    files = [Path(images.location(index)) for index in range(len(images))]
    read = {files[index] for index in _spread(len(files), SOURCE_IMAGES)}
    found = hashlib.sha256()
    for file in sorted(files):
        contents = file_sha256(file) if file in read and file.is_file() else ""  # a link may lead nowhere
        found.update(f"{file.relative_to(folder).as_posix()} {contents}\n".encode("utf-8", "surrogateescape"))
    return found.hexdigest()


def parse_settings(
    pairs: list[str], option: str = "--set", example: str = "lr=1e-4", kinds: Sequence[Callable[[str], Any]] = _KINDS
) -> dict[str, Any]:
    """Read KEY=VALUE pairs of an option, each value as the first of `kinds` that takes it, or as a word."""
    settings: dict[str, Any] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals:
            raise SettingError(f"{option} {pair}: expected KEY=VALUE, e.g. {option} {example}")
        settings[key] = value
        for read in kinds:
            with suppress(ValueError, yaml.YAMLError):
                settings[key] = read(value)
                break
    return settings
