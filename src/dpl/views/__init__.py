"""Views of image batches: augmented as the authors of each method drew them, or shifted; plain torch, on any device.

A view takes images and returns images; it knows no network and no method.
"""

from dpl.views.draw import View, seeded
from dpl.views.recipes import (
    adacontrast_strong_view,
    adacontrast_weak_view,
    check_images,
    cotta_view,
    memo_view,
    rmt_view,
    roid_view,
)

__all__ = [
    "View",
    "adacontrast_strong_view",
    "adacontrast_weak_view",
    "check_images",
    "cotta_view",
    "memo_view",
    "rmt_view",
    "roid_view",
    "seeded",
]
