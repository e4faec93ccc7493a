"""The choice of method and settings from the stream itself: `dpl.adapt(model)`."""

from dpl.auto.method import Auto, AutoSettings
from dpl.auto.recommendation import Recommendation

__all__ = ["Auto", "AutoSettings", "Recommendation"]
