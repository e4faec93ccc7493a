"""What a machine adds to experiments: where their files are, caches, and models that are kept from unit to unit."""

import json
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dpl.backbones import create, keep_classes
from dpl.bench.domains import FOLDER
from dpl.bench.images import StreamedDomain, UnitStream, part_of
from dpl.bench.unit import SourceData, Unit, with_tuples
from dpl.core.errors import DataError
from dpl.core.files import file_sha256
from dpl.data import Benchmark, DataWarning, ImageSet, batches, open_benchmark, open_folder
from dpl.data.folders import shorten
from dpl.data.imagenet_variants import IMAGENET_VARIANTS
from dpl.data.sets import joined
from dpl.data.transforms import make_transform
from dpl.model.adaptive import AdaptiveModel, adapt
from dpl.streams.protocol import seeded

__all__ = ["BenchContext", "SourceBatches"]

_KEPT_OPEN = 16  # a set of 50,000 files keeps 50,000 names in memory


@dataclass(frozen=True)
class SourceBatches:
    """Labelled source images in a seeded order, the same at every iteration."""

    images: ImageSet
    transform: str
    batch_size: int
    seed: int
    device: str = "cpu"

    def __str__(self) -> str:
        return f"{len(self.images):,} images of {self.images.name}"

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        order, transform = seeded(self.seed, "source").permutation(len(self.images)), make_transform(self.transform)
        read = batches(self.images, order, transform, self.batch_size, workers=1, on_error="raise")
        for batch in read:
            images = batch.images.to(self.device, memory_format=torch.channels_last)
            yield images, batch.labels.to(self.device)


@dataclass
class BenchContext:
    """Where things are on this machine, and what is kept in memory between units."""

    data: Path
    weights: Path = Path()  # folder of the source weights
    config: Path = Path()  # folder of the experiment file
    files: dict[str, Path] = field(default_factory=dict)  # weight and list files by the SHA-256 of their content
    cache: Path = Path("cache")  # folder for regenerated corruptions
    decoded: Path | None = None  # folder for decoded images; None: they are decoded each time
    device: str = "cpu"
    modules: tuple[str, ...] = ()  # of the user's own, which register methods; each process imports them
    _digests: dict[Path, str] = field(default_factory=dict)
    _open: dict[str, tuple[Benchmark, tuple[str, ...]]] = field(default_factory=dict)
    _network: tuple[str, nn.Module] | None = None
    _model: tuple[str, AdaptiveModel] | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Leave what is open out of copies for other processes: they open their own."""
        return vars(self) | {"_open": {}, "_network": None, "_model": None}

    def absolute(self) -> "BenchContext":
        """Return the context for processes that start in another folder."""
        folders: dict[str, Any] = {name: path.absolute() for name, path in vars(self).items() if isinstance(path, Path)}
        return replace(self, **folders, files={digest: path.absolute() for digest, path in self.files.items()})

    def open(self, name: str, **options: Any) -> tuple[Benchmark, tuple[str, ...]]:
        """Open a data set and say in what it differs from the published one; the last few stay open."""
        key = f"{name} {sorted(options.items())}"
        if key not in self._open:
            while len(self._open) >= _KEPT_OPEN:
                del self._open[next(iter(self._open))]
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                benchmark = self._folders(**options) if name == FOLDER else open_benchmark(name, self.data, **options)
            notes = tuple(str(w.message) for w in caught if issubclass(w.category, DataWarning))
            self._open[key] = benchmark, notes
        return self._open[key]

    def _folders(self, domains: Sequence[str]) -> Benchmark:
        """Open folders below the data folder as domains; all have the same classes."""
        sets = {path: open_folder(self.data / path) for path in domains}
        first = next(iter(sets.values()))
        for path, image_set in sets.items():
            if image_set.classes != first.classes:
                raise DataError(
                    f"{self.data / path}: its classes ({shorten(image_set.classes)}) are not those of "
                    f"{self.data / domains[0]} ({shorten(first.classes)}); expected the same class folders in each"
                )
        return Benchmark(FOLDER, sets, first.classes)

    def open_source(self, source: SourceData) -> Benchmark:
        """Open the data set that source images come from."""
        split: dict[str, Any] = {} if source.split is None else {"split": source.split}
        options = {"domains": source.domains} if source.dataset == FOLDER else split
        return self.open(source.dataset, **options)[0]

    def find(self, name: str) -> Path:
        """Return a list file named relative to the data folder or to the experiment file."""
        for base in (self.data, self.config):
            if (base / name).is_file():
                return base / name
        raise DataError(f"{name}: no such file below {self.data} or {self.config}")

    def digest(self, path: Path) -> str:
        """Return a file's hash, computed once, and remember its path."""
        if path not in self._digests:
            self._digests[path] = file_sha256(path)
        self.files.setdefault(self._digests[path], path)
        return self._digests[path]

    def file(self, digest: str) -> Path:
        """Return the file with this content."""
        if digest not in self.files:
            raise DataError(f"no file with the SHA-256 {digest[:16]}... was given; name it in the experiment file")
        return self.files[digest]

    def prepared(self, stream: UnitStream) -> AdaptiveModel:
        """Return the unit's adaptive model at its source state; the last one is kept, since many units share it."""
        unit, first = stream.unit, stream.parts[0]
        shared = ("dataset", "limit", "part", "holdout", "corrupt", "transform", "network", "weights", "method",
                  "settings", "source", "seed")  # fmt: skip
        key = json.dumps({k: v for k, v in unit.record().items() if k in shared}, sort_keys=True)
        if self._model is None or self._model[0] != key:
            self._model = None  # before the next is made: two may not fit into memory
            torch.manual_seed(unit.seed)
            network = self.source_network(unit, len(first.images.classes))
            source = None if unit.source is None else self._source(unit, unit.source, first)
            self._model = key, adapt(network, unit.method, source=source, **with_tuples(unit.settings))
        model = self._model[1]
        model.reset()
        torch.manual_seed(unit.seed)
        return model

    def source_network(self, unit: Unit, classes: int) -> nn.Module:
        """Return the network with its source weights and the wanted outputs, in the fastest layout of convolutions."""
        options = {option: self.file(digest) for option, digest in unit.files.items()}
        outputs = self.open(unit.dataset, **options)[0].outputs if unit.dataset in IMAGENET_VARIANTS else None
        key = f"{unit.network} {unit.weights} {classes} {outputs} {self.device}"
        if self._network is None or self._network[0] != key:
            known = classes if outputs is None else None  # as published
            network = create(unit.network, num_classes=known, weights=self.file(unit.weights))
            if outputs is not None:
                keep_classes(network, outputs)
            network.to(self.device, memory_format=torch.channels_last)  # type: ignore[call-overload]
            self._network = (key, network)
        return self._network[1]

    def _source(self, unit: Unit, source: SourceData, first: StreamedDomain) -> SourceBatches:
        benchmark = self.open_source(source)
        names = list(benchmark.domains)
        sets = []
        for name in source.domains or names:
            whole = benchmark[name]
            if source.part == "rest":
                positions = np.setdiff1d(np.arange(len(whole)), first.positions)
            else:
                positions = part_of(len(whole), source.part, names.index(name), unit.seed, unit.holdout)
            if len(positions) == 0:
                raise DataError(
                    f"source: no image of {whole.name} is left over by the stream; set a smaller limit, or name "
                    "another data set as source"
                )
            sets.append(whole.subset(positions))
        transform = source.transform or unit.transform
        return SourceBatches(joined(sets), transform, source.batch_size, unit.seed, self.device)
