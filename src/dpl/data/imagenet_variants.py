"""Other test sets for ImageNet networks: ImageNet-R, ImageNet-A, ImageNet-V2 and ImageNet-Sketch, in class folders.

ImageNet-R and ImageNet-A have 200 of the 1,000 classes. Their results are computed over these 200 outputs alone, so
the benchmark says which outputs of the network they are (`Benchmark.outputs`).
"""

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dpl.core.errors import DataError
from dpl.core.extras import optional
from dpl.data.folders import class_places, find_home, labelled_files, shorten, sub_folders, warn_counts
from dpl.data.imagenet import Names, has_class_folders, read_names
from dpl.data.sets import Benchmark, Files, ImageSet

__all__ = ["IMAGENET_VARIANTS", "ImageNetVariant", "open_imagenet_variant"]


@dataclass(frozen=True)
class ImageNetVariant:
    """One test set: its name, the folders in which it is met, and its published size."""

    name: str
    folders: tuple[str, ...]
    classes: int
    images: int


_V2 = tuple(f"imagenetv2-{kind}-format-val" for kind in ("matched-frequency", "threshold0.7", "top-images"))

IMAGENET_VARIANTS = {
    "imagenet_r": ImageNetVariant("ImageNet-R", ("imagenet-r",), 200, 30_000),
    "imagenet_a": ImageNetVariant("ImageNet-A", ("imagenet-a",), 200, 7_500),
    "imagenet_v2": ImageNetVariant("ImageNet-V2", ("imagenet-v2", *_V2), 1000, 10_000),
    "imagenet_sketch": ImageNetVariant("ImageNet-Sketch", ("imagenet-sketch", "sketch"), 1000, 50_889),
}


def open_imagenet_variant(
    variant: ImageNetVariant, root: str | os.PathLike[str], *, classes: Names | None = None
) -> Benchmark:
    """Open a test set in class folders, named by WordNet id or, as in ImageNet-V2, by class number.

    `classes` are the WordNet ids of all outputs of the network, in order: a list, or a text file with one per line.
    Without it timm's list of the 1,000 ids is used.
    """
    folder = find_home(root, variant.folders, has_class_folders, _layout(variant))
    found = sub_folders(folder)
    if len(found) != variant.classes:
        raise DataError(f"{folder}: {len(found)} class folders; {variant.name} has {variant.classes}. Copy it again")
    outputs = _outputs(folder, found, classes)
    places = class_places(folder, found, found)
    names, labels = labelled_files(folder, folder, places)
    title = variant.name
    images = ImageSet(title, tuple(found), np.array(labels), Files(folder, tuple(names), as_stored=True))
    warn_counts(title, {"test": len(images)}, {"test": variant.images})
    return Benchmark(title, {"test": images}, tuple(found), outputs)


def _outputs(folder: Path, found: list[str], classes: Names | None) -> tuple[int, ...]:
    """Return the network's output for each class folder."""
    if classes is None and all(name.isdecimal() for name in found):
        return tuple(int(name) for name in found)
    order = _timm_ids() if classes is None else read_names(classes)
    places = {name: place for place, name in enumerate(order)}
    unknown = [name for name in found if name not in places]
    if unknown:
        raise DataError(
            f"{folder}: {len(unknown)} folders are not among the {len(order):,} classes of the network, such as "
            f"{shorten(unknown, 3)}; give classes=: the names of all its outputs in order"
        )
    return tuple(places[name] for name in found)


def _timm_ids() -> tuple[str, ...]:
    return tuple(optional("timm.data", "bench").ImageNetInfo().label_names())


def _layout(variant: ImageNetVariant) -> str:
    kind = "by number 0 ... 999" if variant.name == "ImageNet-V2" else "by WordNet id n01440764 ..."
    return f"  {variant.folders[0]}/\n    <class>/*   ({variant.classes} class folders, {kind})"
