"""The image corruptions of Hendrycks and Dietterich's benchmark, for arrays, folders of images and CIFAR-C files."""

from dpl.data.corruptions.apply import corrupt
from dpl.data.corruptions.changing import CorruptionPair, changing_corruptions, corrupt_pair
from dpl.data.corruptions.constants import SEVERITIES
from dpl.data.corruptions.folder import FolderReport, corrupt_folder
from dpl.data.corruptions.stacks import corrupt_arrays
from dpl.data.corruptions.stream import changing_images
from dpl.data.facts import CORRUPTIONS, EXTRA_CORRUPTIONS

__all__ = [
    "CORRUPTIONS",
    "EXTRA_CORRUPTIONS",
    "SEVERITIES",
    "CorruptionPair",
    "FolderReport",
    "changing_corruptions",
    "changing_images",
    "corrupt",
    "corrupt_arrays",
    "corrupt_folder",
    "corrupt_pair",
]
