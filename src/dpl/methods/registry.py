"""Every method by name, with the record of what it is and needs."""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pkgutil import iter_modules
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from dpl.core.errors import SettingError, did_you_mean
from dpl.core.extras import entry_points, import_object

if TYPE_CHECKING:
    from dpl.methods.base import Method

__all__ = ["MethodInfo", "get_method", "list_methods", "register"]


@dataclass(frozen=True)
class MethodInfo:
    """What a user wants to know before choosing a method."""

    name: str
    paper: str  # authors, title, venue
    updates: str  # what changes, in words
    passes: str  # cost for each batch, e.g. "1 forward, 1 backward"
    needs_classifier: bool = False
    needs_norm: bool = False  # useless without BatchNorm layers
    source: Literal["never", "once", "always"] = "never"  # when labelled source data are needed
    views: bool = False  # makes augmented views; images must be in [0, 1]
    min_batch: int = 1  # smaller batches are predicted without an update
    host_reads: int = 0  # most reads on the host in a step away from a CPU, beside the model's own check of the batch


_methods: dict[str, type["Method[Any]"]] = {}
M = TypeVar("M", bound="type[Method[Any]]")


def register(name: str, *, paper: str, updates: str, passes: str, **needs: Any) -> Callable[[M], M]:
    """Register a method class under its name, which is also its file's, its table label and its command-line name."""

    def decorate(method: M) -> M:
        if name in _methods and _methods[name].__qualname__ != method.__qualname__:
            raise SettingError(f"method {name!r} is registered already, by {_methods[name].__qualname__}")
        method.info = MethodInfo(name, paper, updates, passes, **needs)
        _methods[name] = method
        return method

    return decorate


def get_method(name: str) -> type["Method[Any]"]:
    """Return the class of the named method; `X+dpl` adds the loss of `dpl`, or of another of its family, to X.

    A method of the user's own may also be named by its place: `package.module:Class`.
    """
    _load_all()
    base, plus, added = name.partition("+")
    if ":" in base:
        base = _registered_name(base)
        name = base + plus + added
    if name in _methods:
        return _methods[name]
    if plus and base in _methods and added in _methods:
        return import_module("dpl.methods.compose").with_added_loss(base, added)  # type: ignore[no-any-return]
    raise SettingError(f"unknown method {name!r}. {did_you_mean(name, _methods)}")


def _registered_name(place: str) -> str:
    """Import a method class and return the name that it registered."""
    found = import_object(place)
    name = str(getattr(getattr(found, "info", None), "name", ""))
    if _methods.get(name) is not found:
        raise SettingError(f"{place!r} is no method: expected a class with the decorator @register")
    return name


def list_methods() -> list[str]:
    """Return the names of all registered methods; `X+dpl` also works for each X that takes gradient steps."""
    _load_all()
    return sorted(_methods)


def _load_all() -> None:
    """Import every module of this package, and what other packages offer as `dpl.methods`: importing registers."""
    import dpl.methods

    for module in iter_modules(dpl.methods.__path__, "dpl.methods."):
        import_module(module.name)
    for point in entry_points("dpl.methods").values():
        point.load()
