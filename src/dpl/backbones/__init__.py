"""Networks by name, with their normalisation as first layer, and weights from files that cannot run code.

Nothing here trains or adapts a network.
"""

from dpl.backbones.classifiers import keep_classes
from dpl.backbones.normalise import Normalized
from dpl.backbones.weights import LoadReport, load_weights
from dpl.backbones.zoo import OWN, NetworkRecord, available, create

__all__ = ["OWN", "LoadReport", "NetworkRecord", "Normalized", "available", "create", "keep_classes", "load_weights"]
