"""Clean images as they look in a stream under corruptions that change continuously."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np
from numpy.typing import ArrayLike
from PIL import Image

from dpl.core.settings import whole_number
from dpl.data.corruptions.changing import CorruptionPair, changing_corruptions, corrupt_pair
from dpl.data.facts import CORRUPTIONS
from dpl.data.sets import ImageSet, Indices, Source, checked_indices
from dpl.data.transforms import Transform, unchanged

__all__ = ["changing_images"]


def changing_images(
    clean: ImageSet,
    order: ArrayLike | None = None,
    *,
    every: int,
    names: Sequence[str] = CORRUPTIONS,
    severity: float = 5.0,
    transform: Transform | None = None,
    walk_seed: int = 0,
    seed: int = 0,
) -> ImageSet:
    """Return images that two corruptions act on, as they are loaded; the two change with an image's place in a stream.

    `order` has the images in their order of arrival (default: as they are). The next pair of `changing_corruptions`,
    drawn with `walk_seed`, comes after `every` images. `transform` resizes images before they are corrupted; `seed` is
    that of the noise.
    """
    every = whole_number("every", every, least=1)
    arrival = checked_indices(order, len(clean))
    places = np.zeros(len(clean), dtype=np.int64)
    places[arrival] = np.arange(len(arrival))
    walk = changing_corruptions(names, severity=severity, seed=walk_seed)
    pairs = tuple(islice(walk, -(-len(arrival) // every)))
    return replace(clean, source=_Changing(clean.source, places, pairs, every, transform or unchanged(), seed))


@dataclass(frozen=True, eq=False)
class _Changing:
    """Images with the pair of corruptions that belongs to the place of each in the stream."""

    clean: Source
    places: Indices
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
