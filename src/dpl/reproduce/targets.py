"""Tables and figures of `dpl reproduce` by name. A new one is a module in `_MODULES` that registers itself."""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from dpl.bench.section import SHIPPED
from dpl.core.errors import SettingError, did_you_mean
from dpl.core.extras import optional
from dpl.reproduce.request import Request, Result

__all__ = ["Target", "experiment_file", "find_target", "register", "targets"]

_MODULES = ("dpl.reproduce.tables", "dpl.reproduce.supervised", "dpl.reproduce.figures", "dpl.reproduce.embeddings")

Make = Callable[[Request], Result]


@dataclass(frozen=True)
class Target:
    """A table or figure of the paper: its name, what it shows, and what makes it."""

    name: str
    purpose: str
    make: Make


_registered: dict[str, Target] = {}


def register(name: str, purpose: str, make: Make) -> None:
    """Add a target."""
    _registered[name] = Target(name, purpose, make)


def targets() -> dict[str, Target]:
    """Return every target by its name."""
    for library in ("pandas", "jinja2"):
        optional(library, "bench")
    for module in _MODULES:
        import_module(module)
    return dict(_registered)


def find_target(name: str) -> Target:
    """Return the target of that name, or raise an error that names the nearest."""
    known = targets()
    if name not in known:
        raise SettingError(f"{name!r} is no table or figure that can be reproduced. {did_you_mean(name, known)}")
    return known[name]


def experiment_file(name: str, given: Path | None) -> Path:
    """Return the experiment file that was asked for, or the one that belongs to a target."""
    if given is not None:
        return given
    place = SHIPPED / f"{name}.yaml"
    if place.is_file():
        return place
    raise SettingError(f"no experiment file {name}.yaml in {SHIPPED}; name one with --config FILE")
