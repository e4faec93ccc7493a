"""Pictures of images whose prediction adaptation changed, found again in the data folder and made small."""

import base64
import io
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from dpl.bench import BenchContext
from dpl.bench.images import streamed_image
from dpl.core.errors import DataError, DplError
from dpl.data.images import decode
from dpl.report.runs import UNKNOWN, Experiment, Integers, Trace

__all__ = ["MOST_PICTURES", "Samples"]

MOST_PICTURES = 400  # in a page
_EACH = 8  # pictures of a kind for a method on a stream

Group = tuple[int, Trace, Integers]
"""Images of one kind: a method's predictions with its first seed, and the rows of the images."""


class Samples:
    """At most `room` pictures by number, and which of them each method on each stream shows, by kind."""

    def __init__(self, experiment: Experiment, room: int = MOST_PICTURES) -> None:
        self._experiment, self._room = experiment, room
        self._context = BenchContext(experiment.data[0]) if experiment.data else None
        self._numbers: dict[tuple[str, int], int | None] = {}
        self.pictures: list[str] = []
        self.names: list[str] = []
        self.reason = self._absence()
        """Why there are no pictures, or fewer than there could be."""
        self._missing = bool(self.reason)
        self.shown = [self._of_stream(stream) for stream in experiment.streams]
        """By stream and method: kind -> [picture, true class or None, source's prediction, own, confidence]."""

    def _absence(self) -> str:
        """Say why the images cannot be found again, empty if they can."""
        experiment = self._experiment
        if experiment.images:
            return "" if self._path(0) else "the folder of the images is not here; name it with --data DIR"
        if self._context is None:
            return "the data folder is not here; name it with --data DIR"
        try:
            streamed_image(next(iter(experiment.units.values())), self._context, 0, 0)
        except (DplError, OSError) as error:
            return f"the data folder does not have them ({str(error).splitlines()[0]})"
        return ""

    def _of_stream(self, stream: str) -> list[dict[str, list[list[Any]]]]:
        """Return the entries of every method on a stream; images that several methods can share come first."""
        methods = self._experiment.methods
        groups = [{} if self._missing else _groups(self._experiment, method, stream) for method in methods]
        uses: Counter[int] = Counter()
        for _, trace, rows in (group for kinds in groups for group in kinds.values()):
            uses.update(trace.image[rows].tolist())
        return [{kind: self._entries(stream, uses, *group) for kind, group in kinds.items()} for kinds in groups]

    def _entries(self, stream: str, uses: Counter[int], seed: int, trace: Trace, chosen: Integers) -> list[list[Any]]:
        compared = bool((trace.source[chosen] != UNKNOWN).any())
        rows, most = chosen.tolist(), _EACH if compared else 3 * _EACH
        if compared:
            rows.sort(key=lambda row: -uses[int(trace.image[row])])
        entries: list[list[Any]] = []
        for record in trace[rows]:
            number = self._number(stream, seed, record) if len(entries) < most else None
            if number is not None:
                classes = [None if k == UNKNOWN else int(k) for k in (record.label, record.source)]
                share = round(100 * float(record.confidence))
                entries.append([number, *classes, int(record.prediction), share])
        return entries

    def _number(self, stream: str, seed: int, record: Any) -> int | None:
        """Return the number of an image's picture, which is made once; None where it cannot be made."""
        key = (stream, int(record.image))
        if key not in self._numbers:
            self._numbers[key] = None
            if len(self.pictures) < self._room:
                try:
                    image, name = self._find(stream, seed, record)
                    self.pictures.append(_thumbnail(image))
                    self.names.append(name)
                    self._numbers[key] = len(self.pictures) - 1
                except (DplError, OSError, KeyError, IndexError) as error:
                    self.reason = f"some images could not be read ({str(error).splitlines()[0]})"
        return self._numbers[key]

    def _find(self, stream: str, seed: int, record: Any) -> tuple[Image.Image, str]:
        """Return an image and its name: of a folder by its name, of a benchmark as it was streamed, not resized."""
        number = int(record.image)
        if self._context is None or self._experiment.images:
            path = self._path(number)
            if path is None:
                raise DataError(f"{Path(self._experiment.images[number]).name} is not in the folder any more")
            return decode(str(path)), path.name
        image, name, label = streamed_image(
            self._experiment.units[stream, seed], self._context, *divmod(number, 1 << 32)
        )
        if label != record.label:
            raise DataError(f"{name} has another class here than in the run")
        return image, Path(name).name

    def _path(self, number: int) -> Path | None:
        places = [folder / self._experiment.images[number] for folder in self._experiment.data]
        return next((path for path in places if path.is_file()), None)


def _groups(experiment: Experiment, method: str, stream: str) -> dict[str, Group]:
    """Return the images of a stream that a method corrected, spoiled or predicted differently."""
    traces = experiment.traces.get((method, stream))
    if not traces or method == experiment.reference:
        return {}
    seed, trace = next(iter(traces.items()))
    compared = trace.source != UNKNOWN
    if not compared.any():
        return {"spread": (seed, trace, np.linspace(0, len(trace) - 1, 3 * _EACH).astype(np.int64))}
    by_source = trace.source == trace.label
    masks = {
        "corrected": trace.known & trace.correct & ~by_source,
        "spoiled": trace.known & ~trace.correct & by_source,
        "changed": ~trace.known & (trace.prediction != trace.source),
    }
    found = {kind: np.flatnonzero(mask & compared) for kind, mask in masks.items()}
    return {kind: (seed, trace, rows) for kind, rows in found.items() if len(rows)}


def _thumbnail(image: Image.Image, side: int = 80) -> str:
    """Return a small picture as a data address; tiny images keep their pixels."""
    small = image.convert("RGB")
    small.thumbnail((side, side))
    buffer = io.BytesIO()
    kind = "png" if max(small.size) <= side // 2 else "jpeg"
    small.save(buffer, format=kind, optimize=True, quality=70)  # PNG has no quality
    return f"data:image/{kind};base64,{base64.b64encode(buffer.getvalue()).decode()}"
