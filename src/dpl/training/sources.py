"""What a source model is trained by: its settings, its source domains, their images for training and validation."""

import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dpl.core.errors import DataError, SettingError
from dpl.core.settings import Checked, setting
from dpl.data import Benchmark, ImageSet, open_benchmark, unchanged
from dpl.data.cache import cached
from dpl.data.loader import in_order
from dpl.data.sets import Files, choose_domains
from dpl.data.transforms import Pixels
from dpl.streams import domainbed_split

__all__ = ["HOLDOUT", "SourceDomain", "Sources", "TrainSpec", "open_sources"]

HOLDOUT = 0.2


@dataclass(frozen=True, kw_only=True)
class TrainSpec(Checked):
    """One source model. The defaults are DomainBed's; two runs with the same settings end with the same weights."""

    dataset: str
    """Name of the benchmark, as `dpl.data.open_benchmark` takes it."""
    target: str | None = setting(None, "domain to leave out; all others are trained on")
    source: str | None = setting(None, "the only domain to train on, instead of a target")
    network: str = setting("resnet18", "name of the network")
    weights: str | Path | None = setting(None, "checkpoint to start from; a head for other classes is replaced")
    size: int = setting(224, "side of the images in pixels", low=1)
    steps: int = setting(5001, "number of updates", low=1)
    lr: float = setting(5e-5, "learning rate of Adam, constant", low=1e-12)
    per_domain: int = setting(32, "images of each source domain in a batch", low=1)
    eval_every: int = setting(300, "steps between validations; also after the first and the last step", low=1)
    max_val: int | None = setting(None, "largest number of validation images of each domain; all if not given", low=1)
    seed: int = setting(0, "seed of batches, augmentation and the initial head", low=0)
    trial_seed: int = setting(0, "seed of the split into training and validation images", low=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.target is None) == (self.source is None):
            raise SettingError(
                f"target={self.target!r}, source={self.source!r}: expected one of them, the domain to leave out or "
                "the only one to train on"
            )


@dataclass(frozen=True)
class SourceDomain:
    """One domain, split into training and validation images."""

    name: str
    index: int
    images: int
    training: ImageSet
    validation: ImageSet


@dataclass(frozen=True)
class Sources:
    """The domains to train on, in the benchmark's order and spelling."""

    dataset: str
    classes: tuple[str, ...]
    target: str | None
    domains: tuple[SourceDomain, ...]
    digest: str
    """Hash of the names and labels of all training and validation images."""


def open_sources(
    spec: TrainSpec, data: str | os.PathLike[str], *, cache: str | os.PathLike[str] | None = None, workers: int = 0
) -> Sources:
    """Open the benchmark below `data` and split each source domain as DomainBed does.

    With `cache`, a folder, images are decoded into it once and read from there.
    """
    benchmark = open_benchmark(spec.dataset, data)
    names = list(benchmark.domains)
    (chosen,) = choose_domains(benchmark.name, [str(spec.target or spec.source)], names)
    wanted = [chosen] if spec.target is None else [name for name in names if name != chosen]
    if not wanted:
        raise SettingError(f"target={chosen!r} is the only domain of {benchmark.name}; no domain is left to train on")
    whole = {name: _labelled(benchmark, name) for name in wanted}
    digest = _digest(whole)
    if cache is not None:
        whole = {name: _decoded(image_set, Path(cache), workers) for name, image_set in whole.items()}
    domains = tuple(_split(spec, name, names.index(name), whole[name]) for name in wanted)
    return Sources(benchmark.name, benchmark.classes, chosen if spec.target else None, domains, digest)


def _labelled(benchmark: Benchmark, name: str) -> ImageSet:
    image_set = benchmark[name]
    if not image_set.labelled:
        raise DataError(f"{image_set.name}: some images have no label; every image of a source domain needs one")
    return image_set


def _split(spec: TrainSpec, name: str, index: int, image_set: ImageSet) -> SourceDomain:
    split = domainbed_split(len(image_set), domain_index=index, trial_seed=spec.trial_seed, holdout=HOLDOUT)
    if len(split.outside) == 0:
        raise DataError(
            f"{image_set.name}: {len(image_set)} images; at least 5 are needed: 20 % are held out for validation"
        )
    validation = image_set.subset(split.outside[: spec.max_val])
    return SourceDomain(name, index, len(image_set), image_set.subset(split.inside), validation)


def _digest(image_sets: dict[str, ImageSet]) -> str:
    digest = hashlib.sha256()
    for name, image_set in image_sets.items():
        files = image_set.source.names if isinstance(image_set.source, Files) else ()
        digest.update("\n".join([name, *files]).encode("utf-8", "surrogateescape"))
        digest.update(np.ascontiguousarray(image_set.labels, dtype="<i8").tobytes())
    return digest.hexdigest()


def _decoded(image_set: ImageSet, folder: Path, workers: int) -> ImageSet:
    """Return the set with its pixels in the cache, in full size, because the augmentation crops before it resizes."""

    def read(index: int) -> Pixels | DataError:
        try:
            return unchanged().pixels(image_set.load(index))
        except DataError as error:
            return error

    def rows() -> Iterator[Pixels | DataError]:
        return in_order(read, range(len(image_set)), workers=workers, ahead=64)

    try:
        held = cached(image_set, unchanged(), folder, rows)
    except DataError as error:
        raise DataError(f"cache: only images of one size can be cached; train without a cache ({error})") from error
    return image_set if held is None else held
