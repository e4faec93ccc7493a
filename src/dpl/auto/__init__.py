"""The choice of method and settings from the stream itself: `dpl.adapt(model)`.

`method` decides; `trial` runs a candidate beside the model that predicts. Comparisons with the unadapted model are the
guard's; what a method does belongs to the methods.
"""

from dpl.auto.method import Auto, AutoSettings, Recommendation

__all__ = ["Auto", "AutoSettings", "Recommendation"]
