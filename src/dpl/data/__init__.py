"""Data sets by local path, images decoded safely, and batches of them.

Nothing here downloads a file or knows a model.
"""

from dpl.data.benchmarks import list_benchmarks, open_benchmark
from dpl.data.folders import open_folder
from dpl.data.images import decode, list_images
from dpl.data.loader import Batch, batches, training_batches
from dpl.data.sets import Benchmark, DataWarning, ImageSet
from dpl.data.transforms import resize_crop, square, to_float, training, unchanged

__all__ = [
    "Batch", "Benchmark", "DataWarning", "ImageSet", "batches", "decode", "list_benchmarks", "list_images",
    "open_benchmark", "open_folder", "resize_crop", "square", "to_float", "training", "training_batches", "unchanged",
]  # fmt: skip
