"""DomainNet-126: four domains of the cleaned DomainNet, chosen and labelled by list files."""

import os
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

import numpy as np

from dpl.core.errors import DataError
from dpl.data.facts import DOMAINNET126_CLASSES, DOMAINNET126_COUNTS
from dpl.data.folders import existing_folder, find_home, layout_error, warn_counts
from dpl.data.images import image_names
from dpl.data.sets import Benchmark, Files, ImageSet, choose_domains

__all__ = ["open_domainnet126"]

_LAYOUT = """\
  DomainNet-126/
    clipart_list.txt, painting_list.txt, real_list.txt, sketch_list.txt   (or in another folder: lists=...)
    clipart/<class>/*.jpg
    painting/<class>/*.jpg
    real/<class>/*.jpg
    sketch/<class>/*.jpg"""


def open_domainnet126(
    root: str | os.PathLike[str],
    *,
    domains: Sequence[str] | None = None,
    lists: str | os.PathLike[str] | None = None,
) -> Benchmark:
    """Open DomainNet-126: images of the cleaned DomainNet, chosen and labelled by one list file per domain.

    `lists` is the folder of the `<domain>_list.txt` files, if they are not beside the images.
    """
    wanted = choose_domains("DomainNet-126", domains, list(DOMAINNET126_COUNTS))

    def holds(folder: Path) -> bool:
        return any((folder / domain).is_dir() for domain in wanted)

    home = find_home(root, ("DomainNet-126", "domainnet126", "domainnet"), holds, _LAYOUT)
    list_folder = _list_folder(home) if lists is None else existing_folder(lists)
    listed = {domain: _read_list(list_folder / f"{domain}_list.txt") for domain in wanted}
    classes = _class_names([line for lines in listed.values() for line in lines])
    sets = {domain: _listed_set(home, domain, lines, classes) for domain, lines in listed.items()}
    warn_counts("DomainNet-126", {domain: len(images) for domain, images in sets.items()}, DOMAINNET126_COUNTS)
    warn_counts("DomainNet-126", {"classes:": len(classes)}, {"classes:": DOMAINNET126_CLASSES})
    return Benchmark("DomainNet-126", sets, classes)


def _list_folder(home: Path) -> Path:
    for name in (".", "lists", "domainnet126_lists", "splits"):
        if any((home / name).glob("*_list.txt")):
            return home / name
    raise layout_error(f"{home}: no list file <domain>_list.txt", _LAYOUT)


def _read_list(path: Path) -> list[tuple[str, int]]:
    """Return (image path, label) for each line `<domain>/<class>/<file> <label>`, with either kind of line end."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise layout_error(f"{path}: cannot be read as a list of images ({error})", _LAYOUT) from error
    entries = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        name, _, label = line.strip().rpartition(" ")
        image = PurePosixPath(name)
        if not label.isdecimal() or len(image.parts) != 3 or {"/", ".."} & set(image.parts):
            raise DataError(f"{path}, line {number}: {line.strip()!r}; expected '<domain>/<class>/<file> <label>'")
        entries.append((str(image), int(label)))
    if not entries:
        raise DataError(f"{path}: the list is empty; copy it again")
    return entries


def _class_names(lines: list[tuple[str, int]]) -> tuple[str, ...]:
    """Return the class folders in the order of their labels; two names for one label are an error."""
    names: dict[int, str] = {}
    for image, label in lines:
        name = image.split("/")[1]
        if names.setdefault(label, name) != name:
            raise DataError(f"DomainNet-126 lists: the label {label} is both {names[label]!r} and {name!r}")
    if sorted(names) != list(range(len(names))):
        raise DataError(f"DomainNet-126 lists: the labels have gaps below {max(names)}; copy the lists again")
    return tuple(names[label] for label in range(len(names)))


def _listed_set(home: Path, domain: str, lines: list[tuple[str, int]], classes: tuple[str, ...]) -> ImageSet:
    folder = home / domain
    there = {f"{domain}/{image}" for image in image_names(folder, recursive=True)}
    missing = [image for image, _ in lines if image not in there]
    if missing:
        raise DataError(
            f"{folder}: {len(missing):,} of {len(lines):,} listed images are missing, the first is {missing[0]}; "
            "unpack the cleaned DomainNet again"
        )
    names, labels = tuple(image for image, _ in lines), np.array([label for _, label in lines])
    return ImageSet(f"DomainNet-126/{domain}", classes, labels, Files(home, names, as_stored=True))
