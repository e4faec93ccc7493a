"""From a unit to its images: which of a data set are streamed, in segments, as batches."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

from dpl.backbones.pretrained import is_pretrained_folder, pretrained_record
from dpl.bench.changing import with_changing_corruptions
from dpl.bench.unit import Unit
from dpl.core.errors import DataError
from dpl.data import Batch, ImageSet, batches, unchanged
from dpl.data.corruptions.regenerate import corrupted_pixels, regenerated
from dpl.data.facts import CORRUPTIONS, DOMAIN_FOLDERS, DOMAINNET126_COUNTS, EXTRA_CORRUPTIONS
from dpl.data.imagenet_variants import IMAGENET_VARIANTS
from dpl.data.sets import NO_LABEL, Indices, joined
from dpl.data.transforms import make_transform
from dpl.streams import Domain, Segment, domainbed_split, plan

if TYPE_CHECKING:
    from dpl.bench.context import BenchContext

__all__ = [
    "CLEAN", "CORRUPTED", "DOMAINS", "FOLDER", "Streamed", "StreamedDomain", "check_classes", "check_data",
    "check_networks", "known_domains", "open_outliers", "open_parts", "part_of", "segment_batches", "segments",
    "streamed_image",
]  # fmt: skip

# Data sets by what their domains are.
DOMAINS = {
    "pacs": tuple(DOMAIN_FOLDERS["pacs"].counts),
    "vlcs": tuple(DOMAIN_FOLDERS["vlcs"].counts),
    "office_home": tuple(DOMAIN_FOLDERS["officehome"].counts),
    "terra_incognita": tuple(DOMAIN_FOLDERS["terraincognita"].counts),
    "domainnet126": tuple(DOMAINNET126_COUNTS),
}
FOLDER = "folder"  # images in class folders; its domains are paths below the data folder
CORRUPTED = ("cifar10_c", "cifar100_c", "imagenet_c")
CLEAN = {"cifar10": "test", "cifar100": "test", "imagenet": "val"} | dict.fromkeys(
    ("cifar10_1", *IMAGENET_VARIANTS), "test"
)


@dataclass(frozen=True)
class StreamedDomain:
    """One domain as it is streamed: its images, and their positions in the whole domain."""

    domain: Domain
    images: ImageSet
    positions: Indices
    whole: int
    notes: tuple[str, ...] = ()
    """In what the data set differs from the published one."""


def known_domains(dataset: str, corrupted: bool) -> tuple[str, ...]:
    """Return the names that a data set's domains can have."""
    if dataset in DOMAINS:
        return DOMAINS[dataset]
    return (*CORRUPTIONS, *EXTRA_CORRUPTIONS) if corrupted or dataset in CORRUPTED else (CLEAN[dataset],)


def _shifts(unit: Unit) -> list[tuple[str, int | None]]:
    """Return every domain of a unit at every severity, in the order in which its predictions number them."""
    levels: Sequence[int | None] = unit.severities or (None,)
    if unit.changing is not None:
        return [("changing", level) for level in levels]
    return [(name, level) for level in levels for name in unit.domains]


def open_parts(unit: Unit, context: "BenchContext") -> list[StreamedDomain]:
    """Open every domain of a unit, at every severity, restricted to the images that are streamed."""
    return [_open(unit, context, name, severity) for name, severity in _shifts(unit)]


def _open(unit: Unit, context: "BenchContext", name: str, severity: int | None) -> StreamedDomain:
    image_set, index, notes = _domain(unit, context, name, severity)
    if not image_set.labelled:
        raise DataError(f"{image_set.name}: some of its images have no label; accuracy needs one for each")
    positions = _first(part_of(len(image_set), unit.part, index, unit.seed, unit.holdout), unit.limit)
    chosen = _chosen(unit, context, image_set, positions, name, severity)
    return StreamedDomain(Domain(name, chosen.labels, severity), chosen, positions, len(image_set), notes)


def _chosen(
    unit: Unit, context: "BenchContext", image_set: ImageSet, positions: Indices, name: str, severity: int | None
) -> ImageSet:
    """Return the images at these positions, corrupted where the unit says so; changing corruptions come later."""
    if unit.corrupt is None or severity is None or unit.changing is not None:
        return image_set.subset(positions)
    transform = make_transform(unit.transform)
    return regenerated(image_set, positions, transform, name, severity, seed=unit.corrupt, cache=context.cache_folder())


def open_outliers(unit: Unit, context: "BenchContext", first: StreamedDomain) -> StreamedDomain | None:
    """Open the images of no known class that the unit mixes into its stream, as many as it asks for."""
    if unit.outliers is None:
        return None
    count = max(1, round(unit.outlier_ratio * len(first.images)))
    is_noise = unit.outliers == "noise"
    whole = _noise(count, first, unit.seed) if is_noise else joined([*context.open(unit.outliers)[0].domains.values()])
    positions = _first(np.arange(len(whole)), count)
    severity = None if is_noise else first.domain.severity
    chosen = _chosen(unit, context, whole, positions, first.domain.name, severity)
    unknown = np.full(len(chosen), NO_LABEL)
    chosen = replace(chosen, classes=first.images.classes, labels=unknown)
    return StreamedDomain(Domain("outliers", unknown), chosen, positions, len(whole))


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


def _noise(count: int, like: StreamedDomain, seed: int) -> ImageSet:
    """Return images of uniform noise, of the size of the stream's first image."""
    width, height = like.images.load(0).size
    pixels = np.random.default_rng(seed).integers(0, 256, (count, height, width, 3), dtype=np.uint8)
    return ImageSet.from_array("noise", pixels, np.zeros(count, dtype=np.int64), ["noise"])


@dataclass(frozen=True)
class Streamed:
    """One image of a stream, seen again."""

    image: Image.Image
    name: str
    label: int
    classes: tuple[str, ...]


def streamed_image(unit: Unit, context: "BenchContext", domain: int, sample: int) -> Streamed:
    """Return an image by the numbers under which a unit's predictions know it, corrupted as it was, not resized."""
    name, severity = _shifts(unit)[domain]
    whole, _, _ = _domain(unit, context, name, severity)
    if not 0 <= sample < len(whole):
        raise DataError(f"{whole.name}: {len(whole):,} images, the run saw number {sample:,}: another data set")
    image = whole.load(sample)
    if unit.changing is not None:
        parts = open_parts(unit, context)
        (segment,) = segments(unit, parts)
        image = _images_of(segment, parts, unit)[0].load(int(np.flatnonzero(parts[0].positions == sample)[0]))
    elif unit.corrupt is not None and severity is not None:
        transform = make_transform(unit.transform)
        image = Image.fromarray(corrupted_pixels(whole, sample, sample, transform, name, severity, unit.corrupt))
    return Streamed(image, whole.location(sample), int(whole.labels[sample]), whole.classes)


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


def segments(unit: Unit, parts: Sequence[StreamedDomain], outliers: StreamedDomain | None = None) -> list[Segment]:
    """Return the order in which a unit meets the images of its parts."""
    return plan(
        unit.protocol, [part.domain for part in parts], seed=unit.seed, order=unit.order, delta=unit.delta,
        visits=unit.visits, imbalance=unit.imbalance, outliers=None if outliers is None else outliers.domain,
    )  # fmt: skip


def segment_batches(
    segment: Segment, parts: Sequence[StreamedDomain], unit: Unit, context: "BenchContext"
) -> Iterator[Batch]:
    """Yield a segment's images in order of arrival; `indices` are rows of the set that `joined` makes of the parts."""
    chosen, rows = _images_of(segment, parts, unit)
    transform = unchanged() if unit.corrupt is not None else make_transform(unit.transform)
    return batches(chosen, rows, transform, unit.batch_size, workers=context.workers, cache=context.decoded)


def _images_of(segment: Segment, parts: Sequence[StreamedDomain], unit: Unit) -> tuple[ImageSet, Indices]:
    """Return the images of all parts that a segment takes from, and their rows in order of arrival."""
    numbers = sorted(set(segment.indices[:, 0].tolist()))
    chosen = joined([parts[number].images for number in numbers])
    offsets = np.zeros(len(parts), dtype=np.int64)
    offsets[numbers] = np.cumsum([0, *(len(parts[number].images) for number in numbers[:-1])])
    rows = offsets[segment.indices[:, 0]] + segment.indices[:, 1]
    if unit.changing is not None:
        chosen = with_changing_corruptions(chosen, rows, unit, unit.changing)
    return chosen, rows


def check_data(units: Iterable[Unit], context: "BenchContext") -> list[str]:
    """Open all that the units stream, without reading images, so that a wrong folder is reported before the first run.

    Returns in what the data differ from the published ones.
    """
    notes: dict[str, None] = {}
    streamed = {(u.dataset, *u.files.items(), *shift, u.source): (u, shift) for u in units for shift in _shifts(u)}
    for unit, (name, severity) in streamed.values():
        image_set, _, found = _domain(unit, context, name, severity)
        notes |= dict.fromkeys(found)
        if unit.source is not None:
            check_classes(context.open_source(unit.source).domains.values(), image_set)
    return list(notes)


def check_networks(units: Iterable[Unit], context: "BenchContext") -> None:
    """Build every network with its weights once, so that one that does not fit is reported before the first run."""
    for unit in {(u.network, u.weights, u.dataset, *u.files.items(), u.domains[0]): u for u in units}.values():
        image_set, _, _ = _domain(unit, context, *_shifts(unit)[0])
        _check_class_order(unit.network, image_set)
        context.source_network(unit, len(image_set.classes))


def _check_class_order(network: str, images: ImageSet) -> None:
    """Refuse a model of transformers that has the data's classes in another order: its labels would be wrong."""
    names = pretrained_record(Path(network)).get("classes", []) if is_pretrained_folder(network) else []
    if names != list(images.classes) and sorted(names) == sorted(images.classes):
        raise DataError(
            f"network: {network} numbers the classes as {names[0]}, {names[1]} ..., {images.name} as "
            f"{images.classes[0]}, {images.classes[1]} ...; `dpl adapt` follows the network's order"
        )


def check_classes(sets: Iterable[ImageSet], streamed: ImageSet) -> None:
    """Refuse source images of another number of classes than the stream's."""
    for image_set in sets:
        if len(image_set.classes) != len(streamed.classes):
            raise DataError(
                f"source: {image_set.name} has {len(image_set.classes)} classes, {streamed.name} has "
                f"{len(streamed.classes)}; source images need the classes of the network"
            )
