"""A run as a page shows it, before any markup: experiments of methods on streams, and what is wrong with the run."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from dpl.reproduce.document import Item
from dpl.reproduce.layouts import Row

__all__ = ["SOURCE", "UNKNOWN", "Event", "Experiment", "Gallery", "Run", "Track", "mean", "paired"]

SOURCE = "source"
UNKNOWN = -1  # label of an image whose class nobody told
Integers = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Track:
    """One method on one stream with one seed: what it answered, image by image in order of arrival."""

    seed: int
    label: Integers
    prediction: Integers
    confidence: NDArray[np.float64]
    image: Integers
    """Tells the images of a stream apart, the same for every method."""

    def __len__(self) -> int:
        return len(self.prediction)

    @property
    def correct(self) -> NDArray[np.bool_]:
        """Whether each answer was right; False where the class is not known."""
        return np.equal(self.prediction, self.label)

    def take(self, rows: Integers) -> "Track":
        """Return these images only."""
        return Track(self.seed, self.label[rows], self.prediction[rows], self.confidence[rows], self.image[rows])


class Gallery:
    """Where the images of a run can be seen again; this one has none and says why."""

    def __init__(self, reason: str = "") -> None:
        self.reason = reason

    def image(self, stream: str, track: Track, place: int) -> tuple[Image.Image, str]:
        """Return an image of a stream and its name, or raise DataError."""
        raise NotImplementedError

    @property
    def open(self) -> bool:
        """Whether images can be asked for."""
        return not self.reason


@dataclass(frozen=True)
class Event:
    """Something that a watcher did or noted during the run."""

    batch: int
    action: str
    reason: str
    method: str = ""
    stream: str = ""
    alarm: bool = False


@dataclass
class Experiment:
    """Methods on streams that can be compared with one another."""

    title: str
    methods: tuple[str, ...]
    streams: tuple[str, ...]
    classes: tuple[str, ...]
    rows: Sequence[Row]
    """One for each finished segment, as `dpl.bench.cell_rows` returns them; of a folder one for each method."""
    tracks: Mapping[tuple[str, str], Sequence[Track]]
    """By method and stream, one for each seed; missing where predictions were lost."""
    facts: tuple[tuple[str, tuple[Item, ...]], ...] = ()
    """Headed lists: protocol, settings, versions."""
    gallery: Gallery = field(default_factory=Gallery)
    events: tuple[Event, ...] = ()
    guarded: bool = False
    notes: tuple[str, ...] = ()

    @property
    def labelled(self) -> bool:
        """Whether there is any image whose class is known."""
        return any(row.get("accuracy") is not None for row in self.rows)

    @property
    def reference(self) -> str | None:
        """The method that the others are compared with: the source model."""
        if SOURCE in self.methods:
            return SOURCE
        plain = [row["label"] for row in self.rows if row.get("method") == SOURCE]
        return plain[0] if plain else None

    def of(self, method: str, stream: str | None = None) -> list[Row]:
        """Return the rows of a method, of one stream or of all."""
        return [r for r in self.rows if r["label"] == method and (stream is None or r["stream"] == stream)]

    def figures(self, method: str, stream: str, name: str = "accuracy") -> dict[int, float]:
        """Return a recorded figure by seed."""
        return {row["seed"]: row[name] for row in self.of(method, stream) if row.get(name) is not None}


@dataclass(frozen=True)
class Run:
    """One RUN of the command line."""

    name: str
    kind: str
    status: str
    """In a few words how far it came."""
    whole: bool
    """Whether nothing is missing or broken."""
    experiments: tuple[Experiment, ...] = ()
    problems: tuple[Item, ...] = ()
    path: Path = Path()


def paired(first: Track, second: Track) -> tuple[Track, Track]:
    """Return both tracks on the images that they share, in the order of the second."""
    place = {image: row for row, image in enumerate(first.image.tolist())}
    rows = [(place[image], row) for row, image in enumerate(second.image.tolist()) if image in place]
    if not rows:
        return first.take(np.arange(0)), second.take(np.arange(0))
    ours, theirs = (np.asarray(part) for part in zip(*rows, strict=True))
    return first.take(ours), second.take(theirs)


def mean(values: Mapping[Any, float]) -> float | None:
    """Return the mean over seeds, None where there is none."""
    return float(np.mean(list(values.values()))) if values else None
