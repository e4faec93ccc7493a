"""Pictures of images whose prediction adaptation changed, found again in the data folder and made small."""

import base64
import io
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from dpl.bench import BenchContext
from dpl.bench.images import streamed_image
from dpl.core.errors import DataError, DplError
from dpl.data.images import decode
from dpl.report.runs import UNKNOWN, Experiment, Integers, PredictionTrace, paired

__all__ = ["MOST_PICTURES", "Samples", "choose_samples"]

MOST_PICTURES = 400  # in a page
_EACH = 8  # pictures of a kind for a method on a stream


class _Group(NamedTuple):
    """Images of one kind: the traces of the source model and of a method, and the rows of the images."""

    source: PredictionTrace | None
    trace: PredictionTrace
    rows: Integers


@dataclass
class Samples:
    """Pictures by number, and which of them each method on each stream shows, by kind."""

    experiment: Experiment
    room: int
    """Most pictures that are made."""
    reason: str = ""
    """Why there are no pictures, or fewer than there could be."""
    pictures: list[str] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    shown: list[list[dict[str, list[list[Any]]]]] = field(default_factory=list)
    """By stream and method: kind -> [picture, true class or None, source's prediction, own prediction, confidence]."""
    _numbers: dict[tuple[str, int], int | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._context = BenchContext(self.experiment.data[0], {}) if self.experiment.data else None

    def number(self, stream: str, trace: PredictionTrace, row: int) -> int | None:
        """Return the number of an image's picture, which is made once; None where it cannot be made."""
        key = (stream, int(trace.image[row]))
        if key not in self._numbers:
            self._numbers[key] = self._make(stream, trace, row) if len(self.pictures) < self.room else None
        return self._numbers[key]

    def _make(self, stream: str, trace: PredictionTrace, row: int) -> int | None:
        try:
            image, name = self._find(stream, trace, row)
        except (DplError, OSError, KeyError, IndexError) as error:
            self.reason = f"some images could not be read ({str(error).splitlines()[0]})"
            return None
        self.pictures.append(_thumbnail(image))
        self.names.append(name)
        return len(self.pictures) - 1

    def _find(self, stream: str, trace: PredictionTrace, row: int) -> tuple[Image.Image, str]:
        """Return an image and its name: of a folder by its name, of a benchmark as it was streamed, not resized."""
        number = int(trace.image[row])
        if self._context is None or self.experiment.images:
            path = _path(self.experiment, number)
            if path is None:
                raise DataError(f"{Path(self.experiment.images[number]).name} is not in the folder any more")
            return decode(str(path)), path.name
        unit = self.experiment.units[stream, trace.seed]
        found = streamed_image(unit, self._context, *divmod(number, 1 << 32))
        if found.label != trace.label[row]:
            raise DataError(f"{found.name} has another class here than in the run")
        return found.image, Path(found.name).name


def _path(experiment: Experiment, number: int) -> Path | None:
    places = [folder / experiment.images[number] for folder in experiment.data]
    return next((path for path in places if path.is_file()), None)


def _absence(experiment: Experiment) -> str:
    """Say why the images of an experiment cannot be found again, empty if they can."""
    if experiment.images:
        return "" if _path(experiment, 0) else "the folder of the images is not here; name it with --data DIR"
    if not experiment.data:
        return "the data folder is not here; name it with --data DIR"
    try:
        streamed_image(next(iter(experiment.units.values())), BenchContext(experiment.data[0], {}), 0, 0)
    except (DplError, OSError) as error:
        return f"the data folder does not have them ({str(error).splitlines()[0]})"
    return ""


def choose_samples(experiment: Experiment, room: int = MOST_PICTURES) -> Samples:
    """Return pictures for every method on every stream; images that several methods can share come first."""
    samples = Samples(experiment, room, _absence(experiment))
    missing = bool(samples.reason)
    for stream in experiment.streams:
        groups = [{} if missing else _groups(experiment, method, stream) for method in experiment.methods]
        uses: Counter[int] = Counter()
        for group in (group for kinds in groups for group in kinds.values()):
            uses.update(group.trace.image[group.rows].tolist())
        samples.shown.append(
            [{kind: _entries(samples, stream, uses, group) for kind, group in kinds.items()} for kinds in groups]
        )
    return samples


def _groups(experiment: Experiment, method: str, stream: str) -> dict[str, _Group]:
    """Return the images of a stream that a method corrected, spoiled or predicted differently."""
    traces = experiment.traces.get((method, stream), ())
    if not traces or method == experiment.reference:
        return {}
    source, trace = experiment.source_trace(stream, traces[0].seed), traces[0]
    if source is None:
        return {"spread": _Group(None, trace, np.linspace(0, len(trace) - 1, 3 * _EACH).astype(np.int64))}
    source, trace = paired(source, trace)
    masks = {
        "corrected": trace.known & trace.correct & ~source.correct,
        "spoiled": trace.known & ~trace.correct & source.correct,
        "changed": ~trace.known & (trace.prediction != source.prediction),
    }
    return {kind: _Group(source, trace, np.flatnonzero(mask)) for kind, mask in masks.items() if mask.any()}


def _entries(samples: Samples, stream: str, uses: Counter[int], group: _Group) -> list[list[Any]]:
    source, trace, rows = group.source, group.trace, group.rows.tolist()
    most = 3 * _EACH if source is None else _EACH
    if source is not None:
        rows.sort(key=lambda row: -uses[int(trace.image[row])])
    entries: list[list[Any]] = []
    for row in rows:
        number = samples.number(stream, trace, row) if len(entries) < most else None
        if number is not None:
            label = None if trace.label[row] == UNKNOWN else int(trace.label[row])
            before = None if source is None else int(source.prediction[row])
            share = round(100 * float(trace.confidence[row]))
            entries.append([number, label, before, int(trace.prediction[row]), share])
    return entries


def _thumbnail(image: Image.Image, side: int = 80) -> str:
    """Return a small picture as a data address; tiny images keep their pixels."""
    small = image.convert("RGB")
    small.thumbnail((side, side))
    buffer = io.BytesIO()
    kind = "png" if max(small.size) <= side // 2 else "jpeg"
    small.save(buffer, format=kind, optimize=True, quality=70)  # PNG has no quality
    return f"data:image/{kind};base64,{base64.b64encode(buffer.getvalue()).decode()}"
