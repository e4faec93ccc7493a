"""Images that adaptation corrected, spoiled or answered otherwise than the source, as small pictures."""

import base64
import io
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from dpl.core.errors import DplError
from dpl.report.model import UNKNOWN, Experiment, Track, paired

__all__ = ["Samples", "choose_samples"]

EACH = 8  # pictures of a kind for a method on a stream
SIDE = 80  # pixels
MOST = 400  # pictures in a page
_QUALITY = 70
_DEALT = 24  # pictures of an unlabelled stream without a source to compare with

Choice = dict[str, Any]


@dataclass
class Samples:
    """Pictures by number, and which of them each method and stream shows, of each kind."""

    pictures: list[str] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    shown: list[list[dict[str, list[list[Any]]]]] = field(default_factory=list)
    """By stream and method: kind -> [picture, true class or None, source's answer, own answer, own confidence]."""
    reason: str = ""
    """Why there are no pictures, or fewer than there could be."""


@dataclass
class _Shop:
    """Makes each picture once."""

    experiment: Experiment
    samples: Samples
    room: int
    made: dict[tuple[str, int], int | None] = field(default_factory=dict)

    def picture(self, stream: str, track: Track, place: int) -> int | None:
        """Return a picture's number, None where the image cannot be had."""
        key = (stream, int(track.image[place]))
        if key not in self.made:
            self.made[key] = self._make(stream, track, place) if len(self.samples.pictures) < self.room else None
        return self.made[key]

    def _make(self, stream: str, track: Track, place: int) -> int | None:
        try:
            image, name = self.experiment.gallery.image(stream, track, place)
        except (DplError, OSError, KeyError, IndexError) as error:
            self.samples.reason = f"some images could not be read ({str(error).splitlines()[0]})"
            return None
        self.samples.pictures.append(thumbnail(image))
        self.samples.names.append(name)
        return len(self.samples.pictures) - 1


def choose_samples(experiment: Experiment, room: int = MOST) -> Samples:
    """Return pictures for every method on every stream; an image that helps to tell many methods is taken first."""
    samples = Samples(reason=experiment.gallery.reason)
    shop = _Shop(experiment, samples, room)
    for stream in experiment.streams:
        kinds = [_kinds(experiment, method, stream) for method in experiment.methods]
        common: Counter[int] = Counter()
        for found in kinds:
            for _, track, rows in found.values():
                common.update(track.image[rows].tolist())
        samples.shown.append([{k: _entries(shop, stream, common, *v) for k, v in found.items()} for found in kinds])
    return samples


Kind = tuple[Track | None, Track, NDArray[np.int64]]


def _kinds(experiment: Experiment, method: str, stream: str) -> dict[str, Kind]:
    """Return which images of a stream are corrected, spoiled or changed by a method."""
    tracks = experiment.tracks.get((method, stream), ())
    others = experiment.tracks.get((experiment.reference or "", stream), ())
    if not tracks or not experiment.gallery.open or (method == experiment.reference):
        return {}
    source = next((other for other in others if other.seed == tracks[0].seed), None)
    if source is None:
        return {"dealt": (None, tracks[0], np.linspace(0, len(tracks[0]) - 1, _DEALT).astype(np.int64))}
    source, track = paired(source, tracks[0])
    known = track.label != UNKNOWN
    masks = {
        "corrected": known & track.correct & ~source.correct,
        "spoiled": known & ~track.correct & source.correct,
        "changed": ~known & (track.prediction != source.prediction),
    }
    return {kind: (source, track, np.flatnonzero(mask)) for kind, mask in masks.items() if mask.any()}


def _entries(
    shop: _Shop, stream: str, common: Counter[int], source: Track | None, track: Track, rows: NDArray[np.int64]
) -> list[list[Any]]:
    most = EACH if source is not None else _DEALT
    order = sorted(rows.tolist(), key=lambda row: (-common[int(track.image[row])], row)) if source is not None else rows
    entries: list[list[Any]] = []
    for row in order:
        number = shop.picture(stream, track, row) if len(entries) < most else None
        if number is not None:
            label = int(track.label[row])
            before = None if source is None else int(source.prediction[row])
            share = round(100 * float(track.confidence[row]))
            entries.append([number, None if label == UNKNOWN else label, before, int(track.prediction[row]), share])
    return entries


def thumbnail(image: Image.Image) -> str:
    """Return a small picture as a data address; tiny images keep their pixels."""
    small = image.convert("RGB")
    small.thumbnail((SIDE, SIDE))
    buffer = io.BytesIO()
    if max(small.size) <= 40:
        small.save(buffer, format="PNG", optimize=True)
        kind = "png"
    else:
        small.save(buffer, format="JPEG", quality=_QUALITY, optimize=True)
        kind = "jpeg"
    return f"data:image/{kind};base64,{base64.b64encode(buffer.getvalue()).decode()}"
