"""Settings of the guard. Every threshold is relative to the frozen source model on the same images."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from dpl.core.errors import SettingError
from dpl.core.settings import Checked, make_settings, setting

__all__ = ["GuardSettings", "guard_settings"]


@dataclass(frozen=True, kw_only=True)
class GuardSettings(Checked):
    """Settings of the guard; the defaults were chosen once and hold for every method."""

    owner: ClassVar[str] = "guard "

    compare_every: int = setting(12, "compare with the source model in every N-th batch", low=1)
    compare_share: float = setting(0.75, "share of a batch that is then compared (at least 8 images)", low=0, high=1)
    allowance: float = setting(0.02, "share of the predictions that may be lost without being counted", low=0, high=1)
    limit: float = setting(8.0, "estimated predictions lost beyond the allowance at which the guard acts", low=0)
    memory: int = setting(128, "images over which the class balance is averaged", low=8)
    min_classes: float = setting(0.3, "a stream shows few classes below this share of them", low=0, high=1)
    few_class_rows: int = setting(256, "images with few classes after which adaptation is paused", low=0)
    forget_after: int = setting(4096, "images without trouble after which the last action no longer counts", low=1)
    freeze_rows: int = setting(2048, "images that a freeze lasts at least; doubles with every further freeze", low=1)
    max_peak_factor: float = setting(4.0, "images brighter than this many times the usual peak are excluded", low=1)
    estimated_loss: float = setting(
        0.0, "estimated loss of accuracy that is tolerated; used where `calibrate=` is given", low=0, high=1
    )
    false_alarm: float = setting(
        0.001, "probability of a false alarm of that test, as far as the estimate is right", low=1e-12, high=0.5
    )
    low: float | None = setting(None, "smallest valid pixel value, if you know it", low=-math.inf, high=math.inf)
    high: float | None = setting(None, "largest valid pixel value, if you know it", low=-math.inf, high=math.inf)
    log: int = setting(256, "events kept in `guard.events`", low=1)


def guard_settings(guard: bool | GuardSettings | Mapping[str, Any] | None) -> GuardSettings | None:
    """Return the settings that `guard=` asks for: False or None for no guard, True for the defaults."""
    if guard is None or guard is False:
        return None
    if isinstance(guard, GuardSettings):
        return guard
    if guard is not True and not isinstance(guard, Mapping):
        raise SettingError(f"guard={guard!r}: expected True, False, dpl.guard.GuardSettings or a mapping of its fields")
    return make_settings(GuardSettings, "the guard", {} if guard is True else guard)
