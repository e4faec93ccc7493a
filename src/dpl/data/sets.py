"""Data sets: labelled images in files or in one array, and benchmarks made of them."""

import os
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray
from PIL import Image

from dpl.core.errors import DataError, SettingError, did_you_mean
from dpl.data.images import MAX_PIXELS, decode

__all__ = [
    "NO_LABEL",
    "Arrays",
    "Benchmark",
    "DataWarning",
    "Files",
    "ImageSet",
    "Source",
    "checked_indices",
    "choose_domains",
    "joined",
    "normalise_name",
]

NO_LABEL = -1
Indices = NDArray[np.int64]


class DataWarning(UserWarning):
    """A data set that can be used but differs from the published one; the message names the difference."""


class Source(Protocol):
    """The images of a set, in files or arrays."""

    def __len__(self) -> int: ...

    def load(self, index: int) -> Image.Image:
        """Return one image as RGB, or raise DataError naming it."""
        ...

    def location(self, index: int) -> str:
        """Return the path, or the array and row, of one image: for messages."""
        ...

    def subset(self, indices: Indices) -> "Source":
        """Return the source of these images only."""
        ...

    def identity(self) -> Iterator[bytes]:
        """Yield bytes that identify this source: changed files or pixels change them."""
        ...


@dataclass(frozen=True, eq=False)
class Files:
    """Image files under one folder, by their names relative to it."""

    root: Path
    names: tuple[str, ...] = field(repr=False)
    as_stored: bool = False
    max_pixels: int = MAX_PIXELS

    def __len__(self) -> int:
        return len(self.names)

    def load(self, index: int) -> Image.Image:
        """Decode one file."""
        return decode(self.location(index), as_stored=self.as_stored, max_pixels=self.max_pixels)

    def location(self, index: int) -> str:
        """Return the path of one file."""
        return os.path.join(self.root, self.names[index])

    def subset(self, indices: Indices) -> "Files":
        """Return these files only."""
        return replace(self, names=tuple(self.names[i] for i in indices))

    def identity(self) -> Iterator[bytes]:
        """Yield each name with size and time of change; a missing file counts as such."""
        yield f"{self.root.absolute()} {self.as_stored} {self.max_pixels}".encode()
        for index, name in enumerate(self.names):
            try:
                status = os.stat(self.location(index))
                yield f"{name} {status.st_size} {status.st_mtime_ns}".encode()
            except OSError:
                yield f"{name} missing".encode()


@dataclass(frozen=True, eq=False)
class Arrays:
    """Images as rows of one 8-bit array [N, H, W, 3], which may be a file mapped into memory."""

    pixels: NDArray[np.uint8] = field(repr=False)
    origin: str = "array"
    rows: Indices | None = field(default=None, repr=False)
    names: tuple[str, ...] | None = field(default=None, repr=False)
    failed: Mapping[int, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        shape = self.pixels.shape
        if self.pixels.dtype != np.uint8 or self.pixels.ndim != 4 or shape[3] != 3:
            raise DataError(f"{self.origin}: {self.pixels.dtype} {list(shape)}; expected uint8 [N, height, width, 3]")

    def __len__(self) -> int:
        return len(self.pixels) if self.rows is None else len(self.rows)

    def load(self, index: int) -> Image.Image:
        """Return one row as an image."""
        row = self.row(index)
        if row in self.failed:
            raise DataError(f"{self.location(index)}: {self.failed[row]}")
        return Image.fromarray(np.asarray(self.pixels[row]))

    def block(self, indices: Indices) -> NDArray[np.uint8]:
        """Return many rows at once, [B, H, W, 3]."""
        return np.asarray(self.pixels[indices if self.rows is None else self.rows[indices]])

    def row(self, index: int) -> int:
        """Return the row of an image of this set in the whole array."""
        return index if self.rows is None else int(self.rows[index])

    def location(self, index: int) -> str:
        """Return the file from which the row was made, or the array and the row."""
        row = self.row(index)
        return f"{self.origin}[{row}]" if self.names is None else self.names[row]

    def subset(self, indices: Indices) -> "Arrays":
        """Return these rows only, without copying pixels."""
        return replace(self, rows=indices if self.rows is None else self.rows[indices])

    def identity(self) -> Iterator[bytes]:
        """Yield the pixels themselves, a few thousand rows at a time."""
        yield repr(self.pixels.shape[1:]).encode()
        for start in range(0, len(self), 4096):
            yield self.block(np.arange(start, min(start + 4096, len(self)))).tobytes()


@dataclass(frozen=True, eq=False)
class ImageSet:
    """Images with labels: `labels[i]` is a position in `classes`, or -1 if it is not known."""

    name: str
    classes: tuple[str, ...]
    labels: NDArray[np.int64]
    source: Source

    def __post_init__(self) -> None:
        labels = np.asarray(self.labels)
        if labels.shape != (len(self.source),):
            raise DataError(f"{self.name}: {labels.shape} labels for {len(self.source)} images; expected one each")
        if labels.size and not NO_LABEL <= labels.min() <= labels.max() < len(self.classes):
            raise DataError(
                f"{self.name}: labels from {labels.min()} to {labels.max()}; expected 0..{len(self.classes) - 1} "
                f"for {len(self.classes)} classes (or {NO_LABEL}: not known)"
            )
        object.__setattr__(self, "labels", labels.astype(np.int64))

    @classmethod
    def from_array(cls, name: str, pixels: ArrayLike, labels: ArrayLike, classes: Sequence[str]) -> "ImageSet":
        """Make a set of an 8-bit array [N, H, W, 3] and its labels [N]."""
        return cls(name, tuple(classes), np.asarray(labels), Arrays(np.asarray(pixels), origin=name))

    def __len__(self) -> int:
        return len(self.source)

    def __repr__(self) -> str:
        return f"ImageSet({self.name!r}, {len(self)} images, {len(self.classes)} classes)"

    @property
    def labelled(self) -> bool:
        """Whether every image has a label."""
        return bool((self.labels != NO_LABEL).all())

    def load(self, index: int) -> Image.Image:
        """Return one image as RGB, or raise DataError naming it."""
        return self.source.load(index)

    def location(self, index: int) -> str:
        """Return the path, or the array and row, of one image."""
        return self.source.location(index)

    def subset(self, indices: ArrayLike) -> "ImageSet":
        """Return the set of these images, in this order."""
        chosen = checked_indices(indices, len(self))
        return replace(self, labels=self.labels[chosen], source=self.source.subset(chosen))


def joined(sets: Sequence[ImageSet]) -> ImageSet:
    """Return several sets of the same classes as one, one after the other."""
    if len(sets) == 1:
        return sets[0]
    labels = np.concatenate([image_set.labels for image_set in sets])
    return ImageSet(" + ".join(s.name for s in sets), sets[0].classes, labels, _Chain(tuple(s.source for s in sets)))


@dataclass(frozen=True, eq=False)
class _Chain:
    """Several sources one after the other."""

    sources: tuple[Source, ...]
    rows: Indices | None = None

    def __len__(self) -> int:
        return sum(map(len, self.sources)) if self.rows is None else len(self.rows)

    def load(self, index: int) -> Image.Image:
        source, row = self._place(index)
        return source.load(row)

    def location(self, index: int) -> str:
        source, row = self._place(index)
        return source.location(row)

    def subset(self, indices: Indices) -> "_Chain":
        return replace(self, rows=indices if self.rows is None else self.rows[indices])

    def identity(self) -> Iterator[bytes]:
        yield b"all" if self.rows is None else self.rows.tobytes()
        for source in self.sources:
            yield from source.identity()

    def _place(self, index: int) -> tuple[Source, int]:
        row = index if self.rows is None else int(self.rows[index])
        starts = [0, *accumulate(len(source) for source in self.sources)]
        number = bisect_right(starts, row) - 1
        return self.sources[number], row - starts[number]


def checked_indices(indices: ArrayLike | None, length: int) -> Indices:
    """Return the indices as int64, all of them for None; one outside the set is an error."""
    if indices is None:
        return np.arange(length)
    chosen = np.asarray(indices)
    if chosen.ndim != 1 or (chosen.size and chosen.dtype.kind not in "iu"):
        raise SettingError(f"indices: {chosen.dtype} {list(chosen.shape)}; expected a flat list of whole numbers")
    if chosen.size and not 0 <= chosen.min() <= chosen.max() < length:
        raise SettingError(f"indices from {chosen.min()} to {chosen.max()}; the set has 0..{length - 1}")
    return chosen.astype(np.int64)


@dataclass(frozen=True, eq=False)
class Benchmark:
    """The domains of one benchmark, in the order in which its authors number them; all share the classes.

    `outputs` is set where the classes are some of those that its networks know: the network's output for each class.
    """

    name: str
    domains: dict[str, ImageSet]
    classes: tuple[str, ...] = field(repr=False)
    outputs: tuple[int, ...] | None = field(default=None, repr=False)

    def __getitem__(self, domain: str) -> ImageSet:
        """Return a domain by its name; capitals, spaces and underscores do not matter."""
        for name, image_set in self.domains.items():
            if normalise_name(name) == normalise_name(domain):
                return image_set
        raise SettingError(f"{self.name} has no domain {domain!r}. {did_you_mean(domain, self.domains)}")

    def __len__(self) -> int:
        """Return the number of images in all domains."""
        return sum(len(image_set) for image_set in self.domains.values())


def normalise_name(name: str) -> str:
    """Return the letters and digits of a name, lower case: the same for `Real World`, `RealWorld` and `real_world`."""
    return "".join(c for c in name.casefold() if c.isalnum())


def choose_domains(name: str, wanted: Sequence[str] | None, known: Sequence[str]) -> list[str]:
    """Return the wanted names in the spelling and order of the known ones; all of them for None."""
    if wanted is None:
        return list(known)
    if isinstance(wanted, str):
        wanted = [wanted]
    spelled = {normalise_name(choice): choice for choice in known}
    for choice in wanted:
        if normalise_name(choice) not in spelled:
            raise SettingError(f"{name} has no domain {choice!r}. {did_you_mean(choice, known)}")
    asked = {normalise_name(choice) for choice in wanted}
    return [choice for key, choice in spelled.items() if key in asked]
