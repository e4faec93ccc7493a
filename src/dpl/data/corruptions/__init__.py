"""The image corruptions of Hendrycks and Dietterich's benchmark, for arrays and for folders of images."""

from dpl.data.corruptions.apply import corrupt
from dpl.data.corruptions.constants import CORRUPTIONS, EXTRA_CORRUPTIONS, SEVERITIES

__all__ = ["CORRUPTIONS", "EXTRA_CORRUPTIONS", "SEVERITIES", "corrupt"]
