"""Image classifiers that transformers' `save_pretrained` wrote to a folder: network, normalisation, classes, size.

The folder has `config.json`, `model.safetensors` and, from the model's processor, `preprocessor_config.json`. It is
read from disk alone, and no code of it runs.
"""

import json
from pathlib import Path
from typing import Any

from torch import nn

from dpl.backbones.normalise import Normalise
from dpl.core.errors import DataError, SettingError
from dpl.core.extras import optional

__all__ = ["WEIGHTS", "build_pretrained", "holds_weights", "is_pretrained_folder", "pretrained_record"]

WEIGHTS = "model.safetensors"
_CONFIG = "config.json"
_PROCESSOR = "preprocessor_config.json"


def is_pretrained_folder(name: str | Path) -> bool:
    """Say whether a name is that of a folder with a model of transformers."""
    return (Path(name) / _CONFIG).is_file()


def holds_weights(name: str | Path, weights: str | Path) -> bool:
    """Say whether `weights` is the weight file of the folder `name`, which its network has from the start."""
    return is_pretrained_folder(name) and Path(weights).resolve() == (Path(name) / WEIGHTS).resolve()


def build_pretrained(folder: Path, num_classes: int | None) -> tuple[nn.Module, Normalise]:
    """Return the network with its weights, and the normalisation of its processor."""
    kind = optional("transformers", "huggingface").AutoModelForImageClassification
    try:
        network: nn.Module = kind.from_pretrained(str(folder), local_files_only=True, use_safetensors=True)
    except (OSError, ValueError) as error:
        raise DataError(f"{folder}: no image classifier of transformers ({error})") from error
    classes: Any = network.config.num_labels  # type: ignore[union-attr]
    if num_classes not in (None, classes):
        raise SettingError(f"num_classes={num_classes}: the network in {folder} has {classes} classes.")
    processor = _read(folder / _PROCESSOR)
    if not processor.get("do_normalize", True):
        return network, "none"
    return network, (processor["image_mean"], processor["image_std"])


def pretrained_record(folder: Path) -> dict[str, Any]:
    """Return the classes, if they have names, and the side of images that are resized without a crop."""
    names = {int(number): name for number, name in _read(folder / _CONFIG).get("id2label", {}).items()}
    record: dict[str, Any] = {}
    if any(name != f"LABEL_{number}" for number, name in names.items()):
        record["classes"] = [names[number] for number in sorted(names)]
    processor = _read(folder / _PROCESSOR)
    if "height" in (processor.get("size") or {}) and not processor.get("do_center_crop"):
        record["size"] = processor["size"]["height"]
    return record


def _read(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text())
    except FileNotFoundError as error:
        raise DataError(f"{path} is missing: save the model's processor there, as well as the model") from error
    except ValueError as error:
        raise DataError(f"{path}: not a JSON file ({error})") from error
    return content if isinstance(content, dict) else {}
