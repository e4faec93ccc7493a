"""From a unit to its images: which of a data set are streamed, in segments, as batches."""

import dataclasses
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from PIL import Image

from dpl.backbones.pretrained import is_pretrained_folder, pretrained_record
from dpl.bench.domains import CLEAN, CORRUPTED, DOMAINS, FOLDER
from dpl.bench.unit import Unit
from dpl.core.errors import DataError
from dpl.data import Batch, ImageSet, batches, unchanged
from dpl.data.corruptions import changing_images
from dpl.data.corruptions.regenerate import corrupted_pixels, regenerated
from dpl.data.outliers import noise_images, without_labels
from dpl.data.sets import Indices, joined
from dpl.data.transforms import make_transform
from dpl.streams import Domain, Order, Segment, domainbed_split, plan

if TYPE_CHECKING:
    from dpl.bench.context import BenchContext

__all__ = ["StreamedDomain", "UnitStream", "check_data", "check_networks", "part_of", "streamed_image"]


def _shifts(unit: Unit) -> list[tuple[str, int | None]]:
    """Return every domain of a unit at every severity, in the order in which its predictions number them."""
    names = unit.domains if unit.changing is None else ("changing",)
    return [(name, level) for level in unit.severities or (None,) for name in names]


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
        order = {field.name: getattr(unit, field.name) for field in dataclasses.fields(Order)}
        domains, outliers = [part.domain for part in self.parts], None
        if unit.outliers is not None:
            self.parts.append(self._outliers(unit.outliers, self.parts[0]))
            outliers = self.parts[-1].domain
        self.segments: list[Segment] = plan(unit.protocol, domains, seed=unit.seed, outliers=outliers, **order)
        if unit.changing is not None:  # which is one part in one segment
            images = changing_images(
                self.parts[0].images, self.segments[0].indices[:, 1], every=unit.changing, names=unit.domains,
                severity=unit.severities[0], transform=make_transform(unit.transform), walk_seed=unit.seed,
                seed=unit.corrupt or 0,
            )  # fmt: skip
            self.parts[0] = self.parts[0]._replace(images=images)

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
        """Return images of no known class: uniform noise, or of another data set and corrupted as the stream is."""
        known = first.images
        count = max(1, round(self.unit.outlier_ratio * len(known)))
        if source == "noise":
            images = whole = noise_images(known, count, seed=self.unit.seed)
            positions = np.arange(count)
        else:
            whole = without_labels(joined([*self.context.open(source)[0].domains.values()]), known.classes)
            positions = _first(np.arange(len(whole)), count)
            images = self._corrupted(whole, positions, first.domain.name, first.domain.severity)
        return StreamedDomain(Domain("outliers", images.labels), images, positions, len(whole))

    def _corrupted(self, whole: ImageSet, positions: Indices, name: str, severity: int | None) -> ImageSet:
        """Return the images at these positions, corrupted where the unit says so; changing corruptions come later."""
        unit = self.unit
        if unit.corrupt is None or severity is None or unit.changing is not None:
            return whole.subset(positions)
        transform, cache = make_transform(unit.transform), self.context.cache
        return regenerated(whole, positions, transform, name, severity, seed=unit.corrupt, cache=cache)

    def members(self, segment: Segment) -> dict[int, StreamedDomain]:
        """Return the parts that a segment takes from, by their numbers."""
        return {number: self.parts[number] for number in np.unique(segment.indices[:, 0]).tolist()}

    def batches(self, segment: Segment) -> Iterator[Batch]:
        """Yield a segment's images in order of arrival; `indices` are rows of the joined images of its members."""
        unit, members = self.unit, self.members(segment)
        offsets = np.zeros(len(self.parts), dtype=np.int64)
        offsets[list(members)] = np.cumsum([0, *(len(part.images) for part in members.values())])[:-1]
        rows = offsets[segment.indices[:, 0]] + segment.indices[:, 1]
        chosen = joined([part.images for part in members.values()])
        transform = unchanged() if unit.corrupt is not None else make_transform(unit.transform)
        return batches(chosen, rows, transform, unit.batch_size, workers=1, cache=self.context.decoded)


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
    if unit.changing is not None:
        part = UnitStream(unit, context).parts[0]
        image = part.images.load(int(np.flatnonzero(part.positions == sample)[0]))
    elif unit.corrupt is not None and severity is not None:
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
    """Open all data of the units before the first run, reading no images; return how they differ from the published."""
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
