"""Optional dependencies, imported on use, and the choice of a device."""

import importlib.util
import os
import sys
from collections.abc import Iterable
from functools import cache
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from dpl.core.errors import MissingExtraError, SettingError

__all__ = [
    "choose_device", "declare_torchvision_operators", "entry_points", "import_modules", "import_object", "optional",
]  # fmt: skip

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
        return importlib.import_module(name)
    except ImportError as error:
        raise MissingExtraError(
            f"{name} is needed here and is not installed: pip install '.[{extra}]' in a checkout of dpl"
        ) from error


def import_object(path: str) -> Any:
    """Import (and run) `package.module` or `package.module:name`, of the user's own; the working directory counts."""
    module, _, name = path.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found = importlib.import_module(module)
    except ImportError as error:
        raise SettingError(f"{path!r} cannot be imported: {error}; expected a module on Python's path") from error
    if name and not hasattr(found, name):
        raise SettingError(f"{path!r}: module {module} has no {name!r}")
    return getattr(found, name) if name else found


def import_modules(paths: Iterable[str]) -> None:
    """Import modules of the user's own, which register methods."""
    for path in paths:
        import_object(path)


@cache
def entry_points(group: str) -> dict[str, metadata.EntryPoint]:
    """Return what installed packages offer under a group, by name."""
    return {point.name: point for point in metadata.entry_points(group=group)}


def declare_torchvision_operators() -> None:
    """Declare the operators that torchvision registers kernels for, where its own library cannot be loaded.

    The torchvision of the Python index is built for CUDA. Beside a CPU-only torch its library is skipped without a
    word, and its import fails: "operator torchvision::nms does not exist". Here one small file is read, and nothing
    imported.
    """
    if torch.version.cuda is not None or hasattr(torch.ops.torchvision, "nms"):
        return
    spec = importlib.util.find_spec("torchvision")
    version = Path(spec.origin).with_name("version.py") if spec is not None and spec.origin else None
    if version is None or not version.is_file() or "+cu" not in version.read_text():
        return
    library = torch.library.Library("torchvision", "FRAGMENT")  # type: ignore[no-untyped-call]
    for operator in ("nms", "qnms"):
        library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")  # type: ignore[no-untyped-call]
    _declared.append(library)
