"""From a unit to its images: which of a data set are streamed, in segments, as batches."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from PIL import Image

from dpl.backbones.pretrained import is_pretrained_folder, pretrained_record
from dpl.bench.domains import CLEAN, CORRUPTED, DOMAINS, FOLDER
from dpl.bench.unit import Unit
from dpl.core.errors import DataError
from dpl.data import Batch, ImageSet, batches, unchanged
from dpl.data.corruptions.regenerate import corrupted_pixels, regenerated
from dpl.data.sets import NO_LABEL, Indices, joined
from dpl.data.transforms import make_transform
from dpl.streams import Domain, Segment, domainbed_split, plan

if TYPE_CHECKING:
    from dpl.bench.context import BenchContext

__all__ = [
    "StreamedDomain", "UnitStream", "check_data", "check_networks", "part_of", "streamed_image",
]  # fmt: skip


def _shifts(unit: Unit) -> list[tuple[str, int | None]]:
    """Return every domain of a unit at every severity, in the order in which its predictions number them."""
    return [(name, level) for level in unit.severities or (None,) for name in unit.domains]


class StreamedDomain(NamedTuple):
    """One domain as it is streamed: its images, and their positions in the whole domain."""

    domain: Domain
    images: ImageSet
    positions: Indices
    whole: int
    notes: tuple[str, ...] = ()  # in what the data set differs from the published one


class UnitStream:
    """What a unit streams: each domain at each severity, at the end its outliers, and their order of arrival."""

    def __init__(self, unit: Unit, context: "BenchContext") -> None:
        self.unit, self.context = unit, context
        self.parts = [self._open(name, severity) for name, severity in _shifts(unit)]
        if unit.outliers is not None:
            self.parts.append(self._outliers(unit.outliers, self.parts[0]))

    def _open(self, name: str, severity: int | None) -> StreamedDomain:
        """Open a domain at a severity, restricted to the images that are streamed."""
        unit = self.unit
        whole, index, notes = _domain(unit, self.context, name, severity)
        if not whole.labelled:
            raise DataError(f"{whole.name}: some of its images have no label; accuracy needs one for each")
        positions = _first(part_of(len(whole), unit.part, index, unit.seed, unit.holdout), unit.limit)
        images = self._corrupted(whole, positions, name, severity)
        return StreamedDomain(Domain(name, images.labels, severity), images, positions, len(whole), notes)

    def _outliers(self, source: str, first: StreamedDomain) -> StreamedDomain:
        """Return images of no known class: of another data set, corrupted as the stream is, or uniform noise."""
        count = max(1, round(self.unit.outlier_ratio * len(first.images)))
        if source == "noise":
            width, height = first.images.load(0).size
            random = np.random.default_rng(self.unit.seed)
            pixels = random.integers(0, 256, (count, height, width, 3), dtype=np.uint8)
            whole, severity = ImageSet.from_array("noise", pixels, np.zeros(count, dtype=np.int64), ["noise"]), None
        else:
            benchmark, _ = self.context.open(source)
            whole, severity = joined([*benchmark.domains.values()]), first.domain.severity
        positions = _first(np.arange(len(whole)), count)
        images = self._corrupted(whole, positions, first.domain.name, severity)
        images = replace(images, classes=first.images.classes, labels=np.full(len(images), NO_LABEL))
        return StreamedDomain(Domain("outliers", images.labels), images, positions, len(whole))

    def _corrupted(self, whole: ImageSet, positions: Indices, name: str, severity: int | None) -> ImageSet:
        """Return the images at these positions, corrupted where the unit says so."""
        unit = self.unit
        if unit.corrupt is None or severity is None:
            return whole.subset(positions)
        transform, cache = make_transform(unit.transform), self.context.cache_folder()
        return regenerated(whole, positions, transform, name, severity, seed=unit.corrupt, cache=cache)

    @cached_property
    def segments(self) -> list[Segment]:
        """The order in which the unit meets the images of its parts."""
        unit, domains = self.unit, [part.domain for part in self.parts]
        return plan(
            unit.protocol, domains[: len(_shifts(unit))], seed=unit.seed, order=unit.order, delta=unit.delta,
            visits=unit.visits, imbalance=unit.imbalance, outliers=None if unit.outliers is None else domains[-1],
        )  # fmt: skip

    def batches(self, segment: Segment) -> Iterator[Batch]:
        """Yield a segment's images in order of arrival; `indices` are rows of the joined images of its parts."""
        unit, context = self.unit, self.context
        numbers = sorted(set(segment.indices[:, 0].tolist()))
        chosen = joined([self.parts[number].images for number in numbers])
        offsets = np.zeros(len(self.parts), dtype=np.int64)
        offsets[numbers] = np.cumsum([0, *(len(self.parts[number].images) for number in numbers[:-1])])
        rows = offsets[segment.indices[:, 0]] + segment.indices[:, 1]
        transform = unchanged() if unit.corrupt is not None else make_transform(unit.transform)
        return batches(chosen, rows, transform, unit.batch_size, workers=1, cache=context.decoded)


def _domain(
    unit: Unit, context: "BenchContext", name: str, severity: int | None
) -> tuple[ImageSet, int, tuple[str, ...]]:
    """Return a domain's whole image set, the domain's number in the benchmark, and what was noted of its data."""
    options: dict[str, Any] = {option: context.file(digest) for option, digest in unit.files.items()}
    if unit.dataset in CORRUPTED:
        options |= {"domains": (name,), "severity": severity}
    elif unit.dataset == FOLDER:
        options["domains"] = unit.domains
    benchmark, notes = context.open(unit.dataset, **options)
    image_set = benchmark[CLEAN.get(unit.dataset, name)]
    return image_set, list(benchmark.domains).index(name) if unit.dataset in DOMAINS else 0, notes


def streamed_image(unit: Unit, context: "BenchContext", domain: int, sample: int) -> tuple[Image.Image, str, int]:
    """Return an image that a unit's predictions know by these numbers, not resized, with its name and its label."""
    name, severity = _shifts(unit)[domain]
    whole, _, _ = _domain(unit, context, name, severity)
    if not 0 <= sample < len(whole):
        raise DataError(f"{whole.name}: {len(whole):,} images, the run saw number {sample:,}: another data set")
    if unit.corrupt is not None and severity is not None:
        transform = make_transform(unit.transform)
        image = Image.fromarray(corrupted_pixels(whole, sample, sample, transform, name, severity, unit.corrupt))
    else:
        image = whole.load(sample)
    return image, whole.location(sample), int(whole.labels[sample])


def part_of(size: int, part: str, index: int, seed: int, holdout: float) -> Indices:
    """Return the positions of a part of a domain."""
    if part == "whole":
        return np.arange(size)
    split = domainbed_split(size, domain_index=index, trial_seed=seed, holdout=holdout)
    chosen = split.inside if part == "inside" else split.outside
    if len(chosen) == 0:
        raise DataError(f"{size} images are too few for a split with a share of {holdout} held out")
    return chosen


def _first(positions: Indices, limit: int | None) -> Indices:
    """Return at most `limit` positions, drawn by their number alone: the same under every corruption and seed."""
    if limit is None or limit >= len(positions):
        return positions
    drawn = np.random.default_rng([0, len(positions)]).permutation(len(positions))[:limit]
    return positions[np.sort(drawn)]


def check_data(units: Iterable[Unit], context: "BenchContext") -> list[str]:
    """Open all that the units stream, without reading images, so that a wrong folder is reported before the first run.

    Returns in what the data differ from the published ones.
    """
    notes: dict[str, None] = {}
    streamed = {(u.dataset, *u.files.items(), *shift, u.source): (u, shift) for u in units for shift in _shifts(u)}
    for unit, (name, severity) in streamed.values():
        image_set, _, found = _domain(unit, context, name, severity)
        notes |= dict.fromkeys(found)
        for source in context.open_source(unit.source).domains.values() if unit.source is not None else ():
            if len(source.classes) != len(image_set.classes):
                raise DataError(
                    f"source: {source.name} has {len(source.classes)} classes, {image_set.name} has "
                    f"{len(image_set.classes)}; source images need the classes of the network"
                )
    return list(notes)


def check_networks(units: Iterable[Unit], context: "BenchContext") -> None:
    """Build every network with its weights once, so that one that does not fit is reported before the first run."""
    for unit in {(u.network, u.weights, u.dataset, *u.files.items(), u.domains[0]): u for u in units}.values():
        image_set, _, _ = _domain(unit, context, *_shifts(unit)[0])
        network, classes = unit.network, image_set.classes
        names = pretrained_record(Path(network)).get("classes", []) if is_pretrained_folder(network) else []
        if names != list(classes) and sorted(names) == sorted(classes):  # its labels would be wrong
            raise DataError(
                f"network: {network} numbers the classes as {names[0]}, {names[1]} ..., {image_set.name} as "
                f"{classes[0]}, {classes[1]} ...; `dpl adapt` follows the network's order"
            )
        context.source_network(unit, len(classes))
