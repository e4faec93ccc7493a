"""Settings: keyword-only, typed, frozen; each field documents itself and knows its valid values."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from torch.nn import Parameter
from torch.optim import Optimizer

from dpl.errors import SettingError, did_you_mean
from dpl.surgery.norm import parse_norm
from dpl.surgery.scope import SCOPES

__all__ = ["GradientSettings", "OptimizerFactory", "Settings", "describe", "make_settings", "setting"]

OptimizerFactory = Callable[[Iterable[Parameter]], Optimizer]
S = TypeVar("S", bound="Settings")


def setting(
    default: Any,
    meaning: str,
    *,
    low: float | None = None,
    high: float | None = None,
    choices: tuple[Any, ...] | None = None,
) -> Any:
    """Return a dataclass field with its default, its meaning and its valid values (both ends included)."""
    return dataclasses.field(default=default, metadata={"help": meaning, "low": low, "high": high, "choices": choices})


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What every method can be told."""

    norm: str | float = setting(
        "running",
        "BatchNorm statistics: 'running', 'batch', 'track' (the batch's, which also move the running ones), "
        "the batch's share in a blend, or 'auto' (that share chosen from the stream)",
    )
    seed: int = setting(0, "seed of the method's own random generator", low=0)

    def __init_subclass__(cls, **defaults: Any) -> None:
        """Let a method change inherited defaults in its class line: `class Tuned(GradientSettings, norm="batch")`."""
        super().__init_subclass__()
        for base in reversed(cls.__mro__[1:]):
            for name, inherited in getattr(base, "__dataclass_fields__", {}).items():
                if name in defaults:
                    cls.__annotations__[name] = inherited.type
                    setattr(cls, name, dataclasses.field(default=defaults[name], metadata=inherited.metadata))

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            _check(field, getattr(self, field.name))
        parse_norm(self.norm)


@dataclass(frozen=True, kw_only=True)
class GradientSettings(Settings):
    """What every method that takes gradient steps can be told."""

    lr: float = setting(1e-3, "learning rate", low=0)
    optimizer: str | OptimizerFactory = setting(
        "adam", "'adam', 'sgd' (momentum 0.9), 'nesterov' (the same with Nesterov's), or a callable of the parameters"
    )
    weight_decay: float = setting(0.0, "weight decay of the optimizer", low=0)
    steps: int = setting(1, "updates for each batch", low=1)
    scope: Literal["affine", "classifier", "features", "all"] = setting("affine", "what trains", choices=SCOPES)
    start: str | None = setting(
        None, "module before which nothing trains (in order of definition); what lies before it runs without a graph"
    )
    interval: int = setting(1, "learn from every k-th batch and only predict the others", low=1)
    least: float = setting(
        0.0, "learn only where this share of a batch was selected, if the method selects", low=0, high=1
    )
    output: Literal["before", "after"] = setting(
        "before", "return the prediction from before or after the last update", choices=("before", "after")
    )


def make_settings(kind: type[S], method: str, values: Mapping[str, Any]) -> S:
    """Build settings from keywords; an unknown one is an error that names the nearest."""
    valid = [field.name for field in dataclasses.fields(kind)]
    for name in values:
        if name not in valid:
            raise SettingError(f"{method!r} has no setting {name!r}. {did_you_mean(name, valid)}")
    return kind(**values)


def describe(kind: type[Settings]) -> list[tuple[str, Any, str]]:
    """Return (name, default, meaning) of every setting."""
    return [(field.name, field.default, field.metadata.get("help", "")) for field in dataclasses.fields(kind)]


def _check(field: "dataclasses.Field[Any]", value: Any) -> None:
    low, high, choices = (field.metadata.get(key) for key in ("low", "high", "choices"))
    if choices is not None and value not in choices:
        raise SettingError(f"{field.name}={value!r}: expected one of {', '.join(map(repr, choices))}")
    if low is None and high is None:
        if isinstance(field.default, bool) and choices is None and not isinstance(value, bool):
            raise SettingError(f"{field.name}={value!r}: expected True or False")
        return
    expected = f"{'a whole number' if isinstance(field.default, int) else 'a number'} {_range(low, high)}"
    is_number = isinstance(value, int if isinstance(field.default, int) else (int, float))
    if not is_number or isinstance(value, bool):
        if value is None and field.default is None:
            return
        raise SettingError(f"{field.name}={value!r} ({type(value).__name__}): expected {expected}")
    if (low is not None and not value >= low) or (high is not None and not value <= high):
        raise SettingError(f"{field.name}={value!r}: expected {expected}")


def _range(low: float | None, high: float | None) -> str:
    if high is None:
        return f"of at least {low}"
    return f"of at most {high}" if low is None else f"from {low} to {high}"
