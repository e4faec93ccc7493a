"""What a source model is trained by: its settings, its source domains split for training and validation, its record."""

import dataclasses
import hashlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dpl.core.errors import DataError, SettingError
from dpl.core.files import file_sha256
from dpl.core.settings import Checked, setting
from dpl.data import ImageSet, open_benchmark, training
from dpl.data.sets import Files, choose_domains
from dpl.streams import domainbed_split, seed_hash

__all__ = ["Sources", "TrainSpec", "open_sources"]

_HOLDOUT = 0.2


@dataclass(frozen=True, kw_only=True)
class TrainSpec(Checked):
    """One source model. The defaults are DomainBed's; two runs with the same settings end with the same weights."""

    dataset: str  # name of the benchmark, as `dpl.data.open_benchmark` takes it
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
class Sources:
    """The domains to train on, by their names and in the order of the benchmark."""

    training: dict[str, ImageSet]
    validation: dict[str, ImageSet]
    classes: tuple[str, ...]
    record: dict[str, Any]  # what a run notes before its first step, with the benchmark's spelling of names


def open_sources(spec: TrainSpec, data: str | os.PathLike[str]) -> Sources:
    """Open the benchmark below `data` and split each source domain as DomainBed does."""
    benchmark = open_benchmark(spec.dataset, data)
    names = list(benchmark.domains)
    (chosen,) = choose_domains(benchmark.name, [str(spec.target or spec.source)], names)
    wanted = [chosen] if spec.target is None else [name for name in names if name != chosen]
    if not wanted:
        raise SettingError(f"target={chosen!r} is the only domain of {benchmark.name}; no domain is left to train on")
    inside: dict[str, ImageSet] = {}
    outside: dict[str, ImageSet] = {}
    domains: dict[str, dict[str, int]] = {}
    for name in wanted:
        images, index = benchmark[name], names.index(name)
        inside[name], outside[name] = _split(images, index, spec)
        counts = {"images": len(images), "training": len(inside[name]), "validation": len(outside[name])}
        domains[name] = counts | {"split_seed": seed_hash(spec.trial_seed, index)}
    digest = _digest({name: benchmark[name] for name in wanted})
    noted = {"images_sha256": digest, "classes": list(benchmark.classes), "domains": domains}
    spelled = {"dataset": benchmark.name, "source" if spec.target is None else "target": chosen}
    return Sources(inside, outside, benchmark.classes, _record(spec, spelled, noted))


def _digest(image_sets: dict[str, ImageSet]) -> str:
    digest = hashlib.sha256()
    for name, image_set in image_sets.items():
        if not image_set.labelled:
            raise DataError(f"{image_set.name}: some images have no label; every image of a source domain needs one")
        files = image_set.source.names if isinstance(image_set.source, Files) else ()
        digest.update("\n".join([name, *files]).encode("utf-8", "surrogateescape"))
        digest.update(np.ascontiguousarray(image_set.labels, dtype="<i8").tobytes())
    return digest.hexdigest()


def _split(images: ImageSet, index: int, spec: TrainSpec) -> tuple[ImageSet, ImageSet]:
    """Return the images of a domain, with its number in the benchmark, for training and for validation."""
    split = domainbed_split(len(images), domain_index=index, trial_seed=spec.trial_seed, holdout=_HOLDOUT)
    if len(split.outside) == 0:
        few = f"{images.name}: {len(images)} images"
        raise DataError(f"{few}; at least 5 are needed: 20 % are held out for validation")
    return images.subset(split.inside), images.subset(split.outside[: spec.max_val])


def _record(spec: TrainSpec, spelled: dict[str, str], data: dict[str, Any]) -> dict[str, Any]:
    settings = dataclasses.asdict(spec) | spelled
    weights = settings.pop("weights")
    settings["weights_sha256"] = None if weights is None else file_sha256(Path(weights))
    return {
        "settings": settings,
        "data": data,
        "protocol": {
            "split": f"DomainBed, {_HOLDOUT:.0%} of each source domain held out for validation",
            "batch": "per_domain images of each source domain, drawn with replacement",
            "optimizer": "Adam, betas 0.9 and 0.999, eps 1e-8, weight decay 0, constant learning rate",
            "batch_norm": "batch statistics in training, running ones in validation",
            "augmentation": dataclasses.asdict(training(spec.size)),
            "validation": f"resized to {spec.size} x {spec.size}, not augmented",
            "selection": "highest mean accuracy over the source domains; of equals the earliest",
        },
        "sessions": [],
        "result": None,
    }
