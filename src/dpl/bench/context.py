"""What a machine adds to a unit: where data and weights lie, caches, and models that are kept from unit to unit."""

import json
import time
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dpl.adapter import AdaptiveModel, adapt
from dpl.backbones import create
from dpl.bench.images import Part, joined, make_transform, part_of
from dpl.bench.spec import SourceData, Unit
from dpl.data import Benchmark, DataWarning, ImageSet, batches, open_benchmark
from dpl.errors import DataError
from dpl.streams.orders import seeded

__all__ = ["Context", "Prepared", "SourceBatches"]


@dataclass(frozen=True)
class SourceBatches:
    """Labelled source images in a seeded order, the same at every iteration."""

    images: ImageSet
    transform: str
    batch_size: int
    seed: int
    workers: int = 0

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        order = seeded(self.seed, "source").permutation(len(self.images))
        for batch in batches(
            self.images, order, make_transform(self.transform), self.batch_size, workers=self.workers, on_error="raise"
        ):
            yield batch.images, batch.labels

    def __len__(self) -> int:
        return -(-len(self.images) // self.batch_size)


@dataclass(frozen=True)
class Prepared:
    """An adaptive model, how long it took to make, and what source images it was given."""

    model: AdaptiveModel
    seconds: float
    source: str


@dataclass
class Context:
    """Where things lie on this machine, and what is kept in memory between units."""

    data: Path
    files: Mapping[str, Path]
    """Weight and list files by the SHA-256 of their content."""
    cache: Path | None = None
    """Folder for regenerated corruptions; None: a temporary one."""
    decoded: Path | None = None
    """Folder for decoded images; None: they are decoded each time."""
    workers: int = 0
    """Threads that read images ahead."""
    notes: dict[str, list[str]] = field(default_factory=dict)
    """What the data sets warned of, by data set."""
    _open: dict[str, Benchmark] = field(default_factory=dict)
    _model: tuple[str, Prepared] | None = None
    _temporary: TemporaryDirectory[str] | None = None

    def benchmark(self, name: str, **options: Any) -> Benchmark:
        """Open a data set, once."""
        key = f"{name} {sorted(options.items())}"
        if key not in self._open:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                self._open[key] = open_benchmark(name, self.data, **options)
            noted = self.notes.setdefault(name, [])
            noted += [
                text for w in caught if issubclass(w.category, DataWarning) and (text := str(w.message)) not in noted
            ]
        return self._open[key]

    def file(self, digest: str) -> Path:
        """Return the file with this content."""
        if digest not in self.files:
            raise DataError(f"no file with the SHA-256 {digest[:16]}... was given; name it in the experiment file")
        return self.files[digest]

    def cache_folder(self) -> Path:
        """Return the folder for what is made on the spot."""
        if self.cache is None:
            self._temporary = self._temporary or TemporaryDirectory(prefix="dpl-bench-")
            return Path(self._temporary.name)
        return self.cache

    def prepared(self, unit: Unit, parts: list[Part]) -> Prepared:
        """Return the unit's adaptive model at its source state; the last one is kept, since many units share it."""
        shared = ("dataset", "limit", "part", "holdout", "corrupt", "transform", "network", "weights", "method",
                  "settings", "source", "seed")  # fmt: skip
        key = json.dumps({k: v for k, v in unit.record().items() if k in shared}, sort_keys=True)
        if self._model is None or self._model[0] != key:
            self._model = None  # before the next is made: two may not fit into memory
            self._model = (key, self._prepare(unit, parts))
        prepared = self._model[1]
        prepared.model.reset()
        torch.manual_seed(unit.seed)
        return prepared

    def _prepare(self, unit: Unit, parts: list[Part]) -> Prepared:
        torch.manual_seed(unit.seed)
        classes = parts[0].images.classes
        network = create(unit.network, num_classes=len(classes), weights=self.file(unit.weights))
        source = None if unit.source is None else self._source(unit, unit.source, parts)
        settings: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in unit.settings.items()}
        start = time.perf_counter()
        model = adapt(network, unit.method, source=source, **settings)
        told = "none" if source is None else f"{len(source.images):,} images of {source.images.name}"
        return Prepared(model, time.perf_counter() - start, told)

    def _source(self, unit: Unit, source: SourceData, parts: list[Part]) -> SourceBatches:
        options = {} if source.split is None else {"split": source.split}
        benchmark = self.benchmark(source.dataset, **options)
        names = list(benchmark.domains)
        sets = []
        for name in source.domains or names:
            whole = benchmark[name]
            if source.part == "rest":
                positions = np.setdiff1d(np.arange(len(whole)), parts[0].positions)
            else:
                positions = part_of(len(whole), source.part, names.index(name), unit.seed, unit.holdout)
            if len(positions) == 0:
                raise DataError(
                    f"source: no image of {whole.name} is left over by the stream; set a smaller limit, or name "
                    "another data set as source"
                )
            sets.append(whole.subset(positions))
        return SourceBatches(joined(sets), unit.transform, source.batch_size, unit.seed, self.workers)
