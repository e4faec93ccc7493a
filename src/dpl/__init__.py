"""Reliable test-time adaptation: `dpl.adapt(model)` gives a classifier that adapts while it predicts.

>>> import dpl
>>> "dpl" in dpl.list_methods()
True
"""

from dpl import memory, objectives
from dpl.backbones.classifiers import zero_shot
from dpl.core.errors import (
    DataError,
    DplError,
    InputError,
    MissingExtraError,
    ModelError,
    SettingError,
    SnapshotCorrupt,
    SnapshotError,
)
from dpl.core.extras import declare_torchvision_operators
from dpl.methods import list_methods
from dpl.model.adaptive import AdaptiveModel, adapt
from dpl.model.last import Last
from dpl.model.load import load

declare_torchvision_operators()

__version__ = "0.2.0"

__all__ = [
    "AdaptiveModel",
    "DataError",
    "DplError",
    "InputError",
    "Last",
    "MissingExtraError",
    "ModelError",
    "SettingError",
    "SnapshotCorrupt",
    "SnapshotError",
    "__version__",
    "adapt",
    "list_methods",
    "load",
    "memory",
    "objectives",
    "zero_shot",
]
