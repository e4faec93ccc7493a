"""Optional dependencies, imported on use, and the choice of a device."""

import importlib
import sys
from types import ModuleType
from typing import Any

import torch

from dpl.core.errors import MissingExtraError, SettingError

__all__ = ["choose_device", "optional", "torchvision"]

# Operators whose absence makes a registry torchvision fail at import beside a CPU-only torch.
_MISSING_OPERATORS = ("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
                      "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")  # fmt: skip
_declared: list[Any] = []  # keeps the operator library alive, without which the declarations would vanish


def choose_device(name: str | None = None) -> torch.device:
    """Return the device of that name; for None or "auto" a GPU if there is one, else the CPU."""
    if name in (None, "auto"):
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise SettingError(f"device={name!r}: {reason}; expected cpu, cuda or cuda:N") from error


def optional(name: str, extra: str) -> ModuleType:
    """Import the module `name`, or raise an error that names the extra to install."""
    try:
        if name.split(".")[0] in {"timm", "torchvision"}:
            torchvision()
        return importlib.import_module(name)
    except ImportError as error:
        raise MissingExtraError(
            f"{name} is needed here and is not installed: pip install '.[{extra}]' in a checkout of dpl"
        ) from error


def torchvision() -> ModuleType:
    """Import torchvision, declaring the two operators that a CPU-only torch lacks if the import needs it."""
    try:
        return importlib.import_module("torchvision")
    except RuntimeError as error:
        if "torchvision::" not in str(error):
            raise
    for name in [m for m in sys.modules if m.split(".")[0] == "torchvision"]:
        del sys.modules[name]
    library = torch.library.Library("torchvision", "FRAGMENT")  # type: ignore[no-untyped-call]
    for operator in _MISSING_OPERATORS:
        library.define(operator)  # type: ignore[no-untyped-call]
    _declared.append(library)
    return importlib.import_module("torchvision")
