"""Networks by name, with their normalisation inside, and weights from files that cannot run code."""

from dpl.backbones.normalise import Normalized
from dpl.backbones.records import OWN, Network
from dpl.backbones.weights import LoadReport, load_weights
from dpl.backbones.zoo import available, create

__all__ = ["OWN", "LoadReport", "Network", "Normalized", "available", "create", "load_weights"]
