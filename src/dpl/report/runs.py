"""A run: experiments with their predictions, and what is missing or damaged; read from a folder of `dpl bench`."""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from dpl.bench import Candidate, Cell, Store, Unit, cell_rows, frame
from dpl.bench.plans import StoredRequest, read_requests
from dpl.bench.selection import chosen, complete
from dpl.core.errors import DataError, DplError
from dpl.data.folders import shorten
from dpl.reproduce.document import Item, grouped, merged, protocol_items, setting_items, version_lines
from dpl.reproduce.layouts import Row

__all__ = [
    "SOURCE", "UNKNOWN", "Experiment", "Facts", "Integers", "PredictionTrace", "Record", "Run", "is_store", "labels_of",
    "paired", "read_json", "read_store",
]  # fmt: skip

SOURCE = "source"
UNKNOWN = -1  # label of an image whose class is not known
_SHARED = ("dataset", "corrupt", "part", "holdout", "limit", "files", "transform", "protocol", "order", "delta",
           "visits", "imbalance", "outliers", "outlier_ratio", "stream_speed", "network")  # fmt: skip

Facts = tuple[tuple[str, tuple[Item, ...]], ...]
Integers = NDArray[np.int64]
Record = Mapping[str, Any]


@dataclass(frozen=True, eq=False)
class PredictionTrace:
    """The predictions of one method on one stream with one seed, in the order in which the images arrived."""

    seed: int
    label: Integers
    prediction: Integers
    confidence: NDArray[np.float64]
    image: Integers
    """Identifies an image of the stream, for every method alike; of a benchmark: domain << 32 | sample."""

    def __len__(self) -> int:
        return len(self.prediction)

    @property
    def known(self) -> NDArray[np.bool_]:
        """Whether the class of each image is known."""
        return np.not_equal(self.label, UNKNOWN)

    @property
    def correct(self) -> NDArray[np.bool_]:
        """Whether each prediction is right; False where the class is not known."""
        return np.equal(self.prediction, self.label)

    def take(self, rows: Integers) -> "PredictionTrace":
        """Return these images only."""
        return PredictionTrace(
            self.seed, self.label[rows], self.prediction[rows], self.confidence[rows], self.image[rows]
        )


def paired(first: PredictionTrace, second: PredictionTrace) -> tuple[PredictionTrace, PredictionTrace]:
    """Return both traces on the images that they share, in the order of the second."""
    places = pd.Index(first.image).get_indexer(pd.Index(second.image))
    shared = np.flatnonzero(places >= 0)
    return first.take(places[shared]), second.take(shared)


@dataclass
class Experiment:
    """Methods on streams that can be compared with one another."""

    title: str
    methods: tuple[str, ...]
    streams: tuple[str, ...]
    classes: tuple[str, ...]
    rows: Sequence[Row]
    """One for each finished segment, as `dpl.bench.cell_rows` returns them; of a folder one for each method."""
    traces: Mapping[tuple[str, str], Sequence[PredictionTrace]]
    """By method and stream, one for each seed; absent where predictions were lost."""
    facts: Facts = ()
    """Lists with a heading: protocol, settings, versions."""
    data: tuple[Path, ...] = ()
    """Folders in which the images may be found again."""
    units: Mapping[tuple[str, int], Unit] = field(default_factory=dict)
    """Of a benchmark: the unit that streamed the images, by stream and seed."""
    images: Sequence[str] = ()
    """Of a folder of images: their paths below one of the `data` folders."""
    events: Sequence[Record] = ()
    """What the guard did: method, batch, action, reason, alarm, and how many images had been seen."""
    guarded: bool = False
    notes: tuple[str, ...] = ()

    @property
    def labelled(self) -> bool:
        """Whether there is any image whose class is known."""
        return any(row.get("accuracy") is not None for row in self.rows)

    @property
    def reference(self) -> str | None:
        """The method that the others are compared with: the source model."""
        if SOURCE in self.methods:
            return SOURCE
        return next((row["label"] for row in self.rows if row.get("method") == SOURCE), None)

    def image_count(self) -> int:
        """Return the number of images of all streams."""
        return sum({row["stream"]: row["n"] for row in self.rows}.values())

    def source_trace(self, stream: str, seed: int) -> PredictionTrace | None:
        """Return the predictions of the source model on a stream with a seed; those for a folder hold for any seed."""
        traces = self.traces.get((self.reference or "", stream), ())
        return next((trace for trace in traces if trace.seed == seed or self.images), None)


@dataclass(frozen=True)
class Run:
    """What was found at one path."""

    name: str
    kind: str
    status: str
    """In a few words how much is finished."""
    whole: bool
    """Whether nothing is missing or damaged."""
    experiments: tuple[Experiment, ...] = ()
    problems: tuple[Item, ...] = ()
    files: tuple[Any, ...] = ()
    """Of `dpl adapt`: the predictions files."""


def is_store(path: Path) -> bool:
    """Return whether a folder looks like one that `dpl bench` wrote to."""
    return any((path / name).is_dir() for name in ("units", "plans", "failures", "claims"))


class _CheckedStore(Store):
    """A store to read: a unit counts as done if its figures match their checksums, even if its predictions are lost."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.sound: dict[str, Unit] = {}
        self.damage: list[Item] = []
        for folder in sorted((root / "units").glob("*")):
            self._check(folder)

    def done(self, unit: Unit) -> bool:
        """Return whether the figures of a unit are those that were written."""
        return unit.key in self.sound

    def units(self) -> Iterator[Unit]:
        """Yield every unit whose figures are those that were written."""
        yield from self.sound.values()

    def _check(self, folder: Path) -> None:
        if folder.name.startswith("."):
            text = "a draft: its process was ended while it was writing; the unit will be run again"
            self.damage.append(Item(folder.name, text))
            return
        unit, faults = _read_unit(folder), _faults(folder)
        if unit is None:
            faults.setdefault("unit.json", "not a unit that this version reads")
        elif unit.key != folder.name:
            faults["unit.json"] = "describes a different unit than the name of its folder"
        if unit is not None and faults.keys() <= {"predictions.npz"}:
            self.sound[unit.key] = unit
        title = folder.name if unit is None else f"{unit.title} ({folder.name})"
        shown = "; its figures are shown, its curves and images cannot be" if folder.name in self.sound else ""
        self.damage += [Item(title, f"{file}: {fault}{shown}") for file, fault in faults.items()]


def _read_unit(folder: Path) -> Unit | None:
    try:
        return Unit.from_record(read_json(folder / "unit.json"))
    except (TypeError, DplError):
        return None


def _faults(folder: Path) -> dict[str, str]:
    """Return what is wrong with each file of a unit."""
    marks = read_json(folder / "done")
    if not marks:
        return {"done": "the mark of completion is missing"}
    names = ("unit.json", "results.jsonl", "predictions.npz")
    return {name: fault for name in names if (fault := _fault(folder / name, marks.get(name)))}


def _fault(path: Path, mark: Any) -> str:
    try:
        data = path.read_bytes()
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    if not isinstance(mark, dict) or len(data) != mark.get("bytes"):
        return f"{len(data):,} bytes instead of {mark and mark.get('bytes')}"
    if hashlib.sha256(data).hexdigest() != mark.get("sha256"):
        return "its content is not what was written (other checksum)"
    return ""


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file, empty where there is none that can be read."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def read_store(root: Path, data: Path | None) -> Run:
    """Return the run in a results folder: whole, half-finished, damaged or empty."""
    store = _CheckedStore(root)
    problems = list(store.damage)
    try:
        requests = read_requests(root)
    except DataError as error:
        problems.append(Item("plan", str(error).replace(str(root), root.name)))
        requests = []
    cells = _cells(requests, store)
    problems += _missing(cells if requests else [], store)
    groups = grouped((repr((c.section, *_shared(c.candidates[0].target))), c) for c in cells if complete(c, store))
    folder = data or next((Path(r.data) for r in reversed(requests) if Path(r.data).is_dir()), None)
    experiments = tuple(_store_experiment(members, store, folder, problems) for members in groups.values())
    done, told = sum(map(len, groups.values())), merged(problems)
    return Run(
        name=requests[-1].title if requests else root.resolve().name,
        kind="benchmark",
        status=_status(done, len(cells) if requests else None, len(told)),
        whole=done > 0 and not told,
        experiments=experiments,
        problems=told,
    )


def _shared(unit: Unit) -> tuple[object, ...]:
    """Return what units must have in common to be compared in one table."""
    return tuple(getattr(unit, name) for name in _SHARED)


def _cells(requests: Sequence[StoredRequest], store: _CheckedStore) -> list[Cell]:
    """Return what was requested, each cell once, then what is stored without a request."""
    cells = {(c.section, c.label, tuple(u.key for u in c.units())): c for request in requests for c in request.cells}
    requested = {unit.key for cell in cells.values() for unit in cell.units()}
    rest = [unit for unit in store.units() if unit.key not in requested and unit.part != "outside"]
    return [*cells.values(), *_unplanned(rest)]


def _unplanned(units: Sequence[Unit]) -> list[Cell]:
    """Return cells for units without a request."""
    cells = []
    for members in grouped((repr(_shared(unit)), unit) for unit in units).values():
        labels = labels_of([(unit.method, {**unit.settings, "batch_size": unit.batch_size}) for unit in members])
        for unit, label in zip(members, labels, strict=True):
            source = unit.trained_on[0] if len(unit.trained_on) == 1 else None
            cells.append(Cell(unit.dataset, label, unit.seed, (Candidate({}, unit),), source))
    return sorted(cells, key=lambda cell: (cell.candidates[0].target.method != SOURCE, cell.label))


def labels_of(runs: Sequence[tuple[str, Record]]) -> list[str]:
    """Return the method of each run, with the settings in which runs of the same method differ."""
    methods, settings = [method for method, _ in runs], frame([values for _, values in runs]).map(repr)
    differ = settings.groupby(methods).nunique() > 1
    labels = []
    for method, values in runs:
        varied = [str(name) for name in differ if differ.at[method, name] and name != "seed"]
        words = ", ".join(f"{name}={values.get(name)}" for name in varied)
        labels.append(f"{method} ({words})" if words else method)
    return labels


def _missing(planned: Sequence[Cell], store: _CheckedStore) -> list[Item]:
    """Return which units failed or were started, which cells are not complete, and why as far as it is known."""
    paths = [path for path in (store.root / "failures").glob("[!.]*.json") if path.stem not in store.sound]
    failed = {path.stem: read_json(path) or {"reason": "the note cannot be read"} for path in sorted(paths)}
    started = {path.stem for path in (store.root / "claims").glob("*.lock")} - store.sound.keys()
    items = [
        Item(str(note.get("unit", key)), f"failed: {note.get('reason', 'no reason was noted')}")
        for key, note in failed.items()
    ]
    state = "started and not finished: running now, or ended early"
    known = {unit.key for cell in planned for unit in cell.units()}
    items += [Item(key, state) for key in sorted(started - known)]
    waiting = grouped(
        ((cell.label, state if keys & started else "not run yet"), cell.candidates[0].target.stream_title)
        for cell in planned
        if not complete(cell, store) and not (keys := {unit.key for unit in cell.units()}) & failed.keys()
    )
    return items + [Item(label, f"{text}: {shorten(streams)}") for (label, text), streams in waiting.items()]


def _status(done: int, planned: int | None, problems: int) -> str:
    if not done:
        return "nothing finished that can be shown" if problems else "empty: no finished result"
    count = f"{done:,} finished" if planned is None else f"{done:,} of {planned:,} finished"
    return f"{count}, {problems} {'problem' if problems == 1 else 'problems'}" if problems else count


def _store_experiment(
    cells: Sequence[Cell], store: _CheckedStore, data: Path | None, problems: list[Item]
) -> Experiment:
    rows = [dict(row) | {"stream": _stream(row)} for row in cell_rows(cells, store)]
    traces = grouped(
        ((cell.label, stream), trace) for cell in cells for stream, trace in _store_traces(cell, store, problems)
    )
    units = {unit.key: unit for unit in (chosen(cell, store).target for cell in cells)}
    first = cells[0].candidates[0].target
    return Experiment(
        title=f"{cells[0].section}: {first.protocol.replace('_', ' ')}, {first.network}",
        methods=tuple(dict.fromkeys(row["label"] for row in rows)),
        streams=tuple(dict.fromkeys(row["stream"] for row in rows)),
        classes=tuple(rows[0]["classes"]),
        rows=rows,
        traces=traces,
        facts=(
            ("Protocol", protocol_items(rows)),
            ("Settings", setting_items(rows)),
            ("Versions", (Item("", ", ".join(version_lines(rows))),)),
        ),
        data=() if data is None else (data,),
        units={(row["stream"], row["seed"]): units[row["unit"]] for row in rows},
        notes=tuple(dict.fromkeys(note for row in rows for note in row["data_notes"])),
    )


def _store_traces(cell: Cell, store: _CheckedStore, problems: list[Item]) -> Iterator[tuple[str, PredictionTrace]]:
    """Yield the predictions of a cell, stream by stream."""
    unit = chosen(cell, store).target
    names = ("segment", "domain", "sample", "label", "prediction", "confidence")
    try:
        arrays = store.predictions(unit)
        segment, domain, sample, label, prediction, confidence = (arrays[name] for name in names)
    except (DataError, KeyError):
        if not any(unit.key in item.subject for item in problems):
            problems.append(Item(f"{unit.title} ({unit.key})", "predictions.npz cannot be read"))
        return
    image = (domain.astype(np.int64) << 32) + sample.astype(np.int64)
    whole = PredictionTrace(
        cell.seed, label.astype(np.int64), prediction.astype(np.int64), confidence.astype(np.float64), image
    )
    for number, record in enumerate(store.records(unit)):
        column = f"{cell.source}->{record['segment']}" if cell.source else record["segment"]
        yield _stream({**record, "column": column}), whole.take(np.flatnonzero(segment == number))


def _stream(row: Row) -> str:
    """Return the name of a segment; a repeated one has the number of its visit."""
    name, visit = str(row["column"]).replace("->", "→"), row.get("visit") or 0
    return f"{name} (visit {visit + 1})" if visit else name
