"""Streams without borders: two corruptions act on each image, and they change with its place in the stream."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np
from PIL import Image

from dpl.bench.unit import Unit
from dpl.data import ImageSet
from dpl.data.corruptions import CorruptionPair, changing_corruptions, corrupt_pair
from dpl.data.sets import Indices, Source
from dpl.data.transforms import Transform, make_transform

__all__ = ["with_changing_corruptions"]


def with_changing_corruptions(images: ImageSet, rows: Indices, unit: Unit, every: int) -> ImageSet:
    """Return clean images as they look if they arrive in the order `rows`; the corruptions change after `every`.

    The order of the corruptions depends on the unit's seed, the noise in them on its seed of corruptions.
    """
    places = np.zeros(len(images), dtype=np.int64)
    places[rows] = np.arange(len(rows))
    walk = changing_corruptions(unit.domains, severity=float(unit.severities[0]), seed=unit.seed)
    pairs = tuple(islice(walk, -(-len(rows) // every)))
    source = _Changing(images.source, places, pairs, every, make_transform(unit.transform), unit.corrupt or 0)
    return replace(images, source=source)


@dataclass(frozen=True, eq=False)
class _Changing:
    """Images that are corrupted when they are loaded; a large one is not compressed afterwards."""

    clean: Source
    places: Indices  # of each image in the stream
    pairs: tuple[CorruptionPair, ...]
    every: int
    transform: Transform
    seed: int

    def __len__(self) -> int:
        return len(self.clean)

    def load(self, index: int) -> Image.Image:
        place = int(self.places[index])
        pixels = self.transform.pixels(self.clean.load(index))[None]
        return Image.fromarray(corrupt_pair(pixels, self.pairs[place // self.every], seed=self.seed, start=place)[0])

    def location(self, index: int) -> str:
        return self.clean.location(index)

    def subset(self, indices: Indices) -> "_Changing":
        return replace(self, clean=self.clean.subset(indices), places=self.places[indices])

    def identity(self) -> Iterator[bytes]:
        yield repr((self.pairs, self.every, self.transform, self.seed)).encode()
        yield self.places.tobytes()
        yield from self.clean.identity()
