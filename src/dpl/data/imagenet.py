"""ImageNet's validation images and ImageNet-C, in class folders named by WordNet id or by class number."""

import os
import re
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

import numpy as np

from dpl.core.errors import DataError, SettingError
from dpl.data.facts import CORRUPTIONS, EXTRA_CORRUPTIONS
from dpl.data.folders import class_places, find_home, labelled_files, layout_error, shorten, sub_folders, warn_counts
from dpl.data.sets import Benchmark, Files, ImageSet, choose_domains

__all__ = ["Names", "has_class_folders", "open_imagenet", "open_imagenet_c", "read_names"]

_CLASSES = 1000
_IMAGES = 50_000
_WORDNET_ID = re.compile(r"n\d{8}")
_GROUPS = ("noise", "blur", "weather", "digital", "extra")
_CLASS_LINES = "<class>/*.JPEG   (1,000 class folders, by WordNet id n01440764 ... or by number 0000 ... 0999)"
_LAYOUT = f"  imagenet2012/\n    val/\n      {_CLASS_LINES}"
_LAYOUT_C = f"""\
  ImageNet-C/
    <corruption>/   (gaussian_noise, shot_noise, ...)
      <severity>/   (1 ... 5)
        {_CLASS_LINES}"""

Names = Sequence[str] | str | os.PathLike[str]


def open_imagenet(
    root: str | os.PathLike[str],
    *,
    images: str | os.PathLike[str] | None = None,
    classes: Names | None = None,
) -> Benchmark:
    """Open validation images in class folders; `images` and `classes` as in `open_imagenet_c`."""
    home = find_home(root, ("imagenet", "imagenet2012", "ILSVRC2012", "imagenet_val", "val"), _holds, _LAYOUT)
    folder = home if has_class_folders(home) else home / "val"
    places, order = _class_places(folder, classes)
    found = _read(f"ImageNet/{folder.name}", folder, places, order, images)
    if images is None:
        warn_counts("ImageNet", {"val": len(found)}, {"val": _IMAGES})
    return Benchmark("ImageNet", {"val": found}, order)


def open_imagenet_c(
    root: str | os.PathLike[str],
    *,
    domains: Sequence[str] | None = None,
    severity: int = 5,
    images: str | os.PathLike[str] | None = None,
    classes: Names | None = None,
) -> Benchmark:
    """Open ImageNet-C at one severity; each corruption is a domain, the usual fifteen by default.

    `images` is a text file that chooses images, one relative path or image id per line (such as the usual list of
    5,000), in the order of the stream. `classes` are the names of all class folders in the network's
    order, or a text file with one per line: needed only if the folders are WordNet ids and not all 1,000.
    """
    if severity not in range(1, 6):
        raise SettingError(f"severity={severity!r}: expected a whole number from 1 to 5")
    wanted = choose_domains("ImageNet-C", domains, CORRUPTIONS if domains is None else CORRUPTIONS + EXTRA_CORRUPTIONS)
    home = find_home(root, ("ImageNet-C",), lambda folder: any(_corruption(folder, name) for name in wanted), _LAYOUT_C)
    folders = {name: _severity_folder(home, name, severity) for name in wanted}
    first = next(iter(folders.values()))
    places, order = _class_places(first, classes)
    for folder in folders.values():
        differing = places.keys() ^ set(sub_folders(folder))
        if differing:
            raise DataError(
                f"{folder}: class folders differ from {first} ({shorten(differing)}); copy the data set again"
            )
    sets = {
        name: _read(f"ImageNet-C/{name}/{severity}", folder, places, order, images) for name, folder in folders.items()
    }
    if images is None:
        warn_counts("ImageNet-C", {n: len(found) for n, found in sets.items()}, dict.fromkeys(wanted, _IMAGES))
    return Benchmark("ImageNet-C", sets, order)


def has_class_folders(folder: Path) -> bool:
    """Return whether sub-folders have the names of classes, as WordNet ids or numbers."""
    return folder.is_dir() and any(name.isdecimal() or _WORDNET_ID.fullmatch(name) for name in sub_folders(folder))


def _holds(folder: Path) -> bool:
    return has_class_folders(folder) or has_class_folders(folder / "val")


def _corruption(home: Path, name: str) -> Path | None:
    """Return the folder of a corruption, which some copies keep in the folder of its group."""
    return next((f for f in (home / name, *(home / group / name for group in _GROUPS)) if f.is_dir()), None)


def _severity_folder(home: Path, name: str, severity: int) -> Path:
    folder = _corruption(home, name)
    if folder is None or not (folder / str(severity)).is_dir():
        raise layout_error(f"{home}: {name}/{severity} is missing", _LAYOUT_C)
    return folder / str(severity)


def _class_places(folder: Path, classes: Names | None) -> tuple[dict[str, int], tuple[str, ...]]:
    """Return the label of each class folder, and all classes in order.

    Numbers are labels. WordNet ids are numbered in sorted order, which is correct only if all of them are there.
    """
    names = sub_folders(folder)
    if classes is not None:
        order = read_names(classes)
        return class_places(folder, names, order), order
    if names and all(name.isdecimal() for name in names):
        places = {name: int(name) for name in names}
        named = {label: name for name, label in places.items()}
        return places, tuple(named.get(label, str(label)) for label in range(max(_CLASSES, max(named) + 1)))
    if len(names) != _CLASSES:
        raise DataError(
            f"{folder}: {len(names)} class folders; labels follow from the sorted names only if all "
            f"{_CLASSES:,} are there. Give classes=: all names in the network's order, or a text file with one per line"
        )
    return class_places(folder, names, names), tuple(names)


def _read(
    name: str, folder: Path, places: dict[str, int], order: tuple[str, ...], images: str | os.PathLike[str] | None
) -> ImageSet:
    names, labels = labelled_files(folder, folder, places, allow_empty=images is not None)
    found = ImageSet(name, order, np.array(labels, dtype=np.int64), Files(folder, tuple(names), as_stored=True))
    return found if images is None else found.subset(_chosen(Path(images), folder, names))


def _chosen(path: Path, folder: Path, names: list[str]) -> list[int]:
    """Return the positions of the listed images in `names`, found by class and name, or else by name."""
    exact = {os.path.splitext(name)[0]: place for place, name in enumerate(names)}
    alone: dict[str, list[int]] = {}
    for place, name in enumerate(names):
        alone.setdefault(PurePosixPath(name).stem, []).append(place)
    chosen: list[int] = []
    missing: list[str] = []
    for line in read_names(path):
        wanted = PurePosixPath(line.split()[0])
        found = [exact[key]] if (key := str(wanted.with_suffix(""))) in exact else alone.get(wanted.stem, [])
        if len(found) == 1:
            chosen += found
        else:
            missing.append(line)
    if missing:
        raise DataError(f"{folder}: {len(missing):,} images listed in {path} are not here: {shorten(missing, 3)}")
    return chosen


def read_names(names: Names) -> tuple[str, ...]:
    """Return the names in a list, or the lines of a text file that are not empty."""
    if not isinstance(names, str | os.PathLike):
        return tuple(names)
    path = names
    try:
        lines = [line.strip() for line in Path(path).read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read as a text file ({error})") from error
    if not any(lines):
        raise DataError(f"{path}: the file is empty; expected one name per line")
    return tuple(line for line in lines if line)
