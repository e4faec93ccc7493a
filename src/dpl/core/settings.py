"""Settings: keyword-only, typed, frozen dataclasses whose fields document themselves and know their valid values."""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from operator import index
from typing import Any, ClassVar, Literal, TypeVar, get_args, get_origin, get_type_hints

from dpl.core.errors import SettingError, did_you_mean

__all__ = ["Checked", "describe", "given_settings", "make_settings", "setting", "whole_number"]

C = TypeVar("C", bound="Checked")


def setting(
    default: Any,
    meaning: str,
    *,
    low: float | None = None,
    high: float | None = None,
    choices: tuple[Any, ...] | None = None,
    formerly: str | None = None,
    later: bool = False,
) -> Any:
    """Return a dataclass field with its default, its meaning and its valid values (both ends included).

    Stored results are found by a key over all settings. `formerly` is the name under which that key knows a renamed
    setting; one that was added `later` takes part only with a value other than its default.
    """
    facts = {"help": meaning, "low": low, "high": high, "choices": choices, "formerly": formerly, "later": later}
    return dataclasses.field(default=default, metadata=facts)


@dataclass(frozen=True, kw_only=True)
class Checked:
    """Base of all settings: every field is checked when they are made."""

    owner: ClassVar[str] = ""  # named before the field in errors, such as "guard "

    def __init_subclass__(cls, **defaults: Any) -> None:
        """Let a class line change inherited defaults: `class Tuned(GradientSettings, norm="batch")`."""
        super().__init_subclass__()
        bases = [base for base in reversed(cls.__mro__[1:]) if dataclasses.is_dataclass(base)]
        inherited = {field.name: field for base in bases for field in dataclasses.fields(base)}
        for name, default in defaults.items():
            if name not in inherited:
                raise SettingError(f"{cls.__name__} inherits no setting {name!r}. {did_you_mean(name, inherited)}")
            cls.__annotations__[name] = inherited[name].type
            setattr(cls, name, dataclasses.field(default=default, metadata=inherited[name].metadata))

    def __post_init__(self) -> None:
        types = get_type_hints(type(self))
        for field in dataclasses.fields(self):
            kind, value = types[field.name], getattr(self, field.name)
            several = get_origin(kind) is tuple and isinstance(value, tuple)
            for entry in value if several else (value,):
                _check(f"{self.owner}{field.name}={entry!r}", field, get_args(kind)[0] if several else kind, entry)


def make_settings(kind: type[C], owner: str, values: Mapping[str, Any]) -> C:
    """Build settings from keywords; an unknown one is an error that names the nearest."""
    valid = [field.name for field in dataclasses.fields(kind)]
    for name in values:
        if name not in valid:
            raise SettingError(f"{owner} has no setting {name!r}. {did_you_mean(str(name), valid)}")
    return kind(**values)


def given_settings(kind: type[C], name: str, given: bool | C | Mapping[str, Any] | None) -> C | None:
    """Return the settings that `guard=` or `estimate=` asks for: False or None for none, True for the defaults."""
    if given is None or given is False:
        return None
    if isinstance(given, kind):
        return given
    if given is not True and not isinstance(given, Mapping):
        expected = f"True, False, dpl.{name}.{kind.__name__} or a mapping of its fields"
        raise SettingError(f"{name}={given!r}: expected {expected}")
    return make_settings(kind, f"the {name}", {} if given is True else given)


def describe(kind: type[Checked]) -> list[tuple[str, Any, str]]:
    """Return (name, default, meaning) of every setting."""
    return [(field.name, field.default, field.metadata.get("help", "")) for field in dataclasses.fields(kind)]


def whole_number(what: str, value: Any, least: int) -> int:
    """Return `value` as an int, or raise when it is no whole number of at least `least`."""
    try:
        number = index(value)
    except TypeError:
        number = least - 1
    if isinstance(value, bool) or number < least:
        raise SettingError(f"{what} must be a whole number of at least {least}, got {value!r}")
    return number


def _check(name: str, field: "dataclasses.Field[Any]", kind: Any, value: Any) -> None:
    low, high = field.metadata.get("low"), field.metadata.get("high")
    kinds = set(get_args(kind) or (kind,))
    choices = field.metadata.get("choices") or (get_args(kind) if get_origin(kind) is Literal else None)
    numeric = low is not None or high is not None or kinds <= {int, float, type(None)}
    if choices is not None:
        if value not in choices:
            raise SettingError(f"{name}: expected one of {', '.join(map(repr, choices))}")
    elif kind is bool:
        if not isinstance(value, bool):
            raise SettingError(f"{name}: expected True or False")
    elif numeric and not (value is None and field.default is None):
        _check_number(name, value, low, high, whole=int in kinds and float not in kinds)


def _check_number(name: str, value: Any, low: float | None, high: float | None, *, whole: bool) -> None:
    limits = {"from": low, "to": high} if None not in (low, high) else {"of at least": low, "of at most": high}
    words = [f" {word} {limit}" for word, limit in limits.items() if limit is not None]
    expected = f"expected a {'whole ' if whole else ''}number{''.join(words)}"
    if isinstance(value, bool) or not isinstance(value, int if whole else (int, float)):
        raise SettingError(f"{name} ({type(value).__name__}): {expected}")
    if not (-math.inf if low is None else low) <= value <= (math.inf if high is None else high):  # NaN is never
        raise SettingError(f"{name}: {expected}")
