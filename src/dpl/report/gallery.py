"""Images of a run, found again in the data folder by what the run recorded of them."""

from collections.abc import Sequence
from pathlib import Path

from PIL import Image

from dpl.bench import BenchContext, Unit
from dpl.bench.images import streamed_image
from dpl.core.errors import DataError, DplError
from dpl.report.model import Gallery, Track
from dpl.reproduce.layouts import Row

__all__ = ["BenchGallery", "bench_gallery"]

_LOW = (1 << 32) - 1


class BenchGallery(Gallery):
    """Images of benchmark data sets."""

    def __init__(self, data: Path, units: dict[tuple[str, int], Unit]) -> None:
        super().__init__()
        self._context = BenchContext(data, {})
        self._units = units

    def image(self, stream: str, track: Track, place: int) -> tuple[Image.Image, str]:
        """Return an image as it was streamed (before it was resized), if its label is still the recorded one."""
        number = int(track.image[place])
        shown = streamed_image(self._units[stream, track.seed], self._context, number >> 32, number & _LOW)
        if shown.label != track.label[place]:
            raise DataError(f"{shown.name} has another class here than in the run")
        return shown.image, Path(shown.name).name


def bench_gallery(units: Sequence[Unit], rows: Sequence[Row], data: Path | None) -> tuple[Gallery, tuple[str, ...]]:
    """Return the gallery of an experiment, and the names of its classes as far as the data folder tells them."""
    if data is None:
        return Gallery("the data folder is not here; name it with --data DIR"), ()
    by_key = {unit.key: unit for unit in units}
    streams = {(row["stream"], row["seed"]): by_key[row["unit"]] for row in rows if row["unit"] in by_key}
    gallery = BenchGallery(data, streams)
    unit = units[0]
    try:
        first = streamed_image(unit, gallery._context, 0, 0)
    except (DplError, OSError) as error:
        return Gallery(f"the data folder does not have them ({str(error).splitlines()[0]})"), ()
    return gallery, first.classes
