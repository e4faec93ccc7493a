"""Folders on disk: finding a data set, reading classes from sub-folders, reporting what is missing."""

import os
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np

from dpl.core.errors import DataError, did_you_mean
from dpl.data.images import EXTENSIONS, MAX_PIXELS, image_names
from dpl.data.sets import NO_LABEL, DataWarning, Files, ImageSet, normalise_name

__all__ = [
    "LayoutError",
    "class_places",
    "existing_folder",
    "find_home",
    "labelled_files",
    "layout_error",
    "open_folder",
    "shorten",
    "sub_folders",
    "warn_counts",
]


def open_folder(
    path: str | os.PathLike[str], classes: Sequence[str] | None = None, *, max_pixels: int = MAX_PIXELS
) -> ImageSet:
    """Open a folder of images.

    Sub-folders are classes and give the labels; a flat folder gives images without labels (-1). `classes` fixes the
    order, as the network knows it: then every sub-folder must be one of them, and some may be absent.
    """
    root = existing_folder(path)
    folders, loose = sub_folders(root), image_names(root)
    if folders and loose:
        raise DataError(
            f"{root}: {len(loose)} images beside the folders {shorten(folders)}; expected either one sub-folder "
            "per class or images alone"
        )
    if not folders and not loose:
        raise DataError(f"{root}: no image found; looked for the extensions {', '.join(sorted(EXTENSIONS))}")
    if loose:
        labels = [NO_LABEL] * len(loose)
        return ImageSet(root.name, tuple(classes or ()), np.array(labels), Files(root, tuple(loose), False, max_pixels))
    order = tuple(classes) if classes is not None else tuple(folders)
    names, labels = labelled_files(root, root, class_places(root, folders, order))
    return ImageSet(root.name, order, np.array(labels), Files(root, tuple(names), False, max_pixels))


def class_places(root: Path, folders: Iterable[str], order: Sequence[str]) -> dict[str, int]:
    """Map each sub-folder to its position among the classes; any other sub-folder is an error."""
    places = {name: place for place, name in enumerate(order)}
    for folder in folders:
        if folder not in places:
            raise DataError(f"{root}: the folder {folder!r} is not one of the classes. {did_you_mean(folder, order)}")
    return {folder: places[folder] for folder in folders}


def existing_folder(path: str | os.PathLike[str]) -> Path:
    """Return the path, or raise DataError if it is not a folder."""
    root = Path(path)
    if not root.is_dir():
        kind = "a file" if root.exists() else "no such folder"
        raise DataError(f"{root}: {kind}; expected a folder")
    return root


def sub_folders(folder: Path) -> list[str]:
    """Return the names of the visible sub-folders: sorted as text, or as numbers if all are numbers."""
    try:
        names = [entry.name for entry in os.scandir(folder) if entry.is_dir() and not _is_ignored(entry.name)]
    except OSError as error:
        raise DataError(f"{folder}: cannot be listed ({error.strerror}); expected a folder") from error
    return sorted(names, key=int) if all(name.isdecimal() for name in names) else sorted(names)


def _is_ignored(name: str) -> bool:
    """Whether the folder is hidden, or the one that macOS adds to archives."""
    return name.startswith(".") or name == "__MACOSX"


def labelled_files(
    root: Path, folder: Path, labels: Mapping[str, int], *, allow_empty: bool = False
) -> tuple[list[str], list[int]]:
    """Return names relative to `root` and labels of all images in `folder/<class>`, class by class, sorted by name.

    A class folder without an image is an error, because an interrupted copy leaves such folders.
    """
    names: list[str] = []
    found: list[int] = []
    empty: list[str] = []
    prefix = "" if folder == root else f"{folder.relative_to(root).as_posix()}/"
    for class_folder, label in labels.items():
        images = image_names(folder / class_folder, recursive=True)
        if not images:
            empty.append(class_folder)
        names += [f"{prefix}{class_folder}/{image}" for image in images]
        found += [label] * len(images)
    if empty and not allow_empty:
        raise DataError(f"{folder}: no image in the class folders {shorten(empty)}; copy the data set again")
    return names, found


def find_home(root: str | os.PathLike[str], names: Sequence[str], holds: Callable[[Path], bool], layout: str) -> Path:
    """Return the folder of a data set: `root` itself, or a sub-folder with one of `names`, if it `holds` the data."""
    base = Path(root)
    if not base.is_dir():
        raise layout_error(f"{base}: {'a file' if base.exists() else 'no such folder'}", layout)
    accepted = {normalise_name(name) for name in names}
    candidates = [base, *(base / folder for folder in sub_folders(base) if normalise_name(folder) in accepted)]
    for candidate in candidates:
        if holds(candidate):
            return candidate
    raise layout_error(f"{base}: {names[0]} was not found here (looked in {shorten(map(str, candidates))})", layout)


class LayoutError(DataError):
    """A data set whose files are not where they should be: the problem in words, the expected layout as a drawing."""

    def __init__(self, problem: str, layout: str) -> None:
        super().__init__(f"{problem}\nexpected:\n{layout}")
        self.problem, self.layout = problem, layout


def layout_error(problem: str, layout: str) -> LayoutError:
    """Return an error that ends with the expected layout."""
    return LayoutError(problem, layout)


def warn_counts(name: str, found: Mapping[str, int], published: Mapping[str, int], note: str = "") -> None:
    """Warn if numbers of images differ from the published ones, naming each difference."""
    differences = [
        f"{part} {count:,} instead of {published[part]:,}"
        for part, count in found.items()
        if part in published and count != published[part]
    ]
    if differences:
        text = f"{name}: {'; '.join(differences)} images. Results are not exactly comparable with published ones."
        warnings.warn(f"{text} {note}".rstrip(), DataWarning, stacklevel=2)


def shorten(names: Iterable[str], limit: int = 5) -> str:
    """Return the first few names and how many more there are."""
    listed = list(names)
    more = f" and {len(listed) - limit} more" if len(listed) > limit else ""
    return ", ".join(listed[:limit]) + more
