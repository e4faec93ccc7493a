"""What the guard can be told; every threshold is relative to the frozen source network on the same images."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dpl.core.errors import SettingError, did_you_mean
from dpl.core.settings import setting

__all__ = ["GuardSettings", "guard_settings"]


@dataclass(frozen=True, kw_only=True)
class GuardSettings:
    """Settings of the guard; the defaults were chosen once and hold for every method."""

    every: int = setting(12, "look at the source's answers in every so-many-th batch", low=1)
    share: float = setting(0.75, "share of a batch's rows looked at then (at least 8 rows)", low=0, high=1)
    allowance: float = setting(0.02, "answers lost against the source that are tolerated, a row", low=0, high=1)
    limit: float = setting(8.0, "estimated answers lost beyond the allowance at which the guard acts", low=0)
    memory: int = setting(128, "rows over which the balance of classes is remembered", low=8)
    min_classes: float = setting(0.3, "a stream that shows fewer than this share of the classes is poor", low=0, high=1)
    patience: int = setting(256, "rows of a poor stream after which learning is held", low=0)
    relapse: int = setting(4096, "rows without trouble after which the guard forgets the last one", low=1)
    wait: int = setting(2048, "rows that a freeze lasts at least; it doubles with every relapse", low=1)
    spread: float = setting(4.0, "rows brighter than this many times the usual peak value are set aside", low=1)
    low: float | None = setting(None, "smallest pixel value of a valid row, if you know it")
    high: float | None = setting(None, "largest pixel value of a valid row, if you know it")
    log: int = setting(256, "events kept in `guard.events`", low=1)

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            _check(field, getattr(self, field.name))


def guard_settings(guard: "bool | GuardSettings | Mapping[str, Any] | None") -> GuardSettings | None:
    """Return the settings that `guard=` asks for: False or None for no guard, True for the defaults."""
    if guard is None or guard is False:
        return None
    if guard is True:
        return GuardSettings()
    if isinstance(guard, GuardSettings):
        return guard
    if not isinstance(guard, Mapping):
        raise SettingError(f"guard={guard!r}: expected True, False, dpl.guard.GuardSettings or a mapping of its fields")
    valid = [field.name for field in dataclasses.fields(GuardSettings)]
    for name in guard:
        if name not in valid:
            raise SettingError(f"the guard has no setting {name!r}. {did_you_mean(str(name), valid)}")
    return GuardSettings(**guard)


def _check(field: "dataclasses.Field[Any]", value: Any) -> None:
    low, high = field.metadata["low"], field.metadata["high"]
    if value is None and field.default is None:
        return
    whole = isinstance(field.default, int)
    if isinstance(value, bool) or not isinstance(value, int if whole else (int, float)):
        raise SettingError(f"guard {field.name}={value!r}: expected a {'whole ' if whole else ''}number")
    if (low is not None and not value >= low) or (high is not None and not value <= high):
        top = "" if high is None else f" and at most {high}"
        raise SettingError(f"guard {field.name}={value!r}: expected at least {low}{top}")
