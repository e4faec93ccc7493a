"""Settings of the guard: every constant that it decides by is here."""

import math
from dataclasses import dataclass
from typing import ClassVar

from dpl.core.settings import Checked, setting

__all__ = ["GuardSettings"]


@dataclass(frozen=True, kw_only=True)
class GuardSettings(Checked):
    """Settings of the guard; the defaults hold for every method."""

    owner: ClassVar[str] = "guard "

    limit: float = setting(8.0, "estimated predictions lost, beyond the allowance, at which the guard acts", low=1)
    allowance: float = setting(0.03, "share of the predictions that may be lost without being counted", low=0, high=1)
    memory: int = setting(128, "images over which predicted classes are counted", low=8)
    share: float = setting(0.05, "time spent on comparisons, as a share of the time of adaptation", low=0, high=4)
    glance: int = setting(8, "in every batch, the source model predicts one image in N; 0 for none", low=0)
    surprise: float = setting(3.0, "standard deviations of a change in disagreement that call for a comparison", low=0)
    freeze_rows: int = setting(512, "images after which a frozen model is tried again; doubles with each freeze", low=1)
    forget_after: int = setting(4096, "images without a freeze after which earlier ones are forgotten", low=1)
    max_peak_factor: float = setting(4.0, "images brighter than this many times the usual peak are excluded", low=1)
    low: float | None = setting(None, "smallest valid pixel value, if you know it", low=-math.inf, high=math.inf)
    high: float | None = setting(None, "largest valid pixel value, if you know it", low=-math.inf, high=math.inf)
    log: int = setting(256, "events kept in `guard.events`", low=1)
