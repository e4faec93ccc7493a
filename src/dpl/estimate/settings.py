"""Settings of the estimate."""

from dataclasses import dataclass
from typing import ClassVar

from dpl.core.settings import Checked, setting
from dpl.methods.parts.norm_rules import ALIKE

__all__ = ["EstimateSettings"]


@dataclass(frozen=True, kw_only=True)
class EstimateSettings(Checked):
    """Settings of the label-free estimate of accuracy."""

    owner: ClassVar[str] = "estimate "

    share: float = setting(0.25, "time spent on the estimate, as a share of the time of adaptation", low=0, high=4)
    window: int = setting(512, "images over which accuracy is estimated", low=32)
    anchors: int = setting(200, "labelled source images that show what the weights have lost", low=0)
    class_worth: float = setting(0.5, "worth of predicting all classes where the other model predicts one", low=0)
    least_shift: float = setting(
        0.016, "shift of the images, in variances of the source's, up to which the source model is believed", low=0
    )
    alike: float = setting(
        ALIKE, "how many times as alike the images of a batch may look where late layers keep source statistics", low=0
    )
    margin: float = setting(0.02, "difference of accuracy below which the verdict is 'unsure'", low=0, high=1)
