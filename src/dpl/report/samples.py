"""Pictures of images whose prediction adaptation changed, found again in the data folder and made small."""

import base64
import io
from itertools import islice
from pathlib import Path
from typing import Any

from PIL import Image

from dpl.bench import BenchContext
from dpl.bench.images import streamed_image
from dpl.core.errors import DataError, DplError
from dpl.data.images import decode
from dpl.report.runs import UNKNOWN, Experiment, Trace

__all__ = ["Samples"]

_MOST = 150  # pictures of an experiment
_EACH = 8  # pictures of a kind for a method on a stream


class Samples:
    """Pictures by number, with the names of their files, and which of them each method on each stream shows."""

    def __init__(self, experiment: Experiment) -> None:
        self._experiment = experiment
        self._context = BenchContext(experiment.data[0] if experiment.data else Path())
        self._numbers: dict[tuple[str, int], int | None] = {}
        self.pictures: list[tuple[str, str]] = []
        # Why there are no pictures, or fewer than there could be.
        self.reason = "" if experiment.data else "the data folder is not here; name it with --data DIR"
        self.shown = [[self._of_kinds(m, stream) for m in experiment.methods] for stream in experiment.streams]
        """By stream and method: kind -> [picture, true class or None, source's prediction, own, confidence]."""

    def _of_kinds(self, method: str, stream: str) -> dict[str, list[list[Any]]]:
        """Return entries for images that a method corrected, spoiled or predicted differently, with its first seed."""
        traces = self._experiment.traces.get((method, stream))
        if not traces or method == self._experiment.reference:
            return {}
        seed, trace = next(iter(traces.items()))
        trace = trace[trace.source != UNKNOWN]
        by_source = trace.source == trace.label
        masks = {
            "corrected": trace.known & trace.correct & ~by_source,
            "spoiled": trace.known & ~trace.correct & by_source,
            "changed": ~trace.known & (trace.prediction != trace.source),
        }
        found = {kind: self._entries(stream, seed, trace[mask]) for kind, mask in masks.items()}
        return {kind: entries for kind, entries in found.items() if entries}

    def _entries(self, stream: str, seed: int, records: Trace) -> list[list[Any]]:
        numbered = ((self._number(stream, seed, record), record) for record in records)
        return [
            [number, None if own.label == UNKNOWN else int(own.label), int(own.source), int(own.prediction),
             round(100 * float(own.confidence))]
            for number, own in islice((pair for pair in numbered if pair[0] is not None), _EACH)
        ]  # fmt: skip

    def _number(self, stream: str, seed: int, record: Any) -> int | None:
        """Return the number of an image's picture, which is made once; None where it cannot be made."""
        key = (stream, int(record.image))
        nothing_is_here = self.reason and not self.pictures
        if key not in self._numbers and len(self.pictures) < _MOST and not nothing_is_here:
            self._numbers[key] = None
            try:
                image, name = self._find(stream, seed, record)
                self.pictures.append((_thumbnail(image), name))
                self._numbers[key] = len(self.pictures) - 1
            except (DplError, OSError, KeyError, IndexError) as error:
                self.reason = f"some images could not be read ({str(error).splitlines()[0]})"
        return self._numbers.get(key)

    def _find(self, stream: str, seed: int, record: Any) -> tuple[Image.Image, str]:
        """Return an image and its name: of a folder by its name, of a benchmark as it was streamed, not resized."""
        experiment, number = self._experiment, int(record.image)
        if experiment.images:
            places = [folder / experiment.images[number] for folder in experiment.data]
            path = next(filter(Path.is_file, places), None)
            if path is None:
                raise DataError(f"{places[0].name} is not in the folder of the images; name it with --data DIR")
            return decode(str(path)), path.name
        image, name, label = streamed_image(experiment.units[stream, seed], self._context, *divmod(number, 1 << 32))
        if label != record.label:
            raise DataError(f"{name} has another class here than in the run")
        return image, Path(name).name


def _thumbnail(image: Image.Image, side: int = 80) -> str:
    """Return a small picture as a data address; tiny images keep their pixels."""
    small = image.convert("RGB")
    small.thumbnail((side, side))
    buffer = io.BytesIO()
    kind = "png" if max(small.size) <= side // 2 else "jpeg"
    small.save(buffer, format=kind, optimize=True, quality=70)  # PNG has no quality
    return f"data:image/{kind};base64,{base64.b64encode(buffer.getvalue()).decode()}"
