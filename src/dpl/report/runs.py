"""A run: experiments with their predictions, and what is missing or damaged; read from a folder of `dpl bench`."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from dpl.bench import Candidate, Cell, Store, Unit, cell_rows, frame
from dpl.bench.store import StoredRequest, chosen, complete, read_requests
from dpl.core.errors import DataError, DplError
from dpl.core.files import read_json
from dpl.data.folders import shorten
from dpl.reproduce.document import Item, grouped, how_measured, merged
from dpl.reproduce.paper import Row

__all__ = [
    "SOURCE", "UNKNOWN", "Experiment", "Integers", "Record", "Run", "Trace", "labels_of", "make_trace", "read_store",
]  # fmt: skip

SOURCE = "source"
UNKNOWN = -1  # label of an image whose class is not known
_shared = attrgetter(
    "dataset", "corrupt", "part", "holdout", "limit", "files", "transform", "protocol", "order", "delta", "visits",
    "imbalance", "outliers", "outlier_ratio", "stream_speed", "network",
)  # fmt: skip
"""Returns what units must have in common to be compared in one table."""

Integers = NDArray[np.int64]
Record = Mapping[str, Any]
Trace = np.recarray[Any, Any]
"""The predictions of one method on one stream with one seed, a record for each image in order of arrival.

`image` identifies an image of the stream, for every method alike; of a benchmark: domain << 32 | sample. `source` is
what the source model predicts for it, UNKNOWN where that was not run or lost.
"""


def make_trace(image: Integers, label: Integers, prediction: Integers, confidence: NDArray[Any]) -> Trace:
    """Return predictions beside whether each class is known, and whether the prediction is right."""
    return pd.DataFrame({
        "image": image, "label": label, "prediction": prediction, "confidence": confidence.astype(np.float64),
        "known": label != UNKNOWN, "correct": label == prediction, "source": UNKNOWN,
    }).to_records(index=False)  # fmt: skip


@dataclass
class Experiment:
    """Methods on streams that can be compared with one another."""

    title: str
    classes: tuple[str, ...]
    rows: Sequence[Row]  # one for each finished segment, as of `dpl.bench.cell_rows`; of a folder one for each method
    traces: Mapping[tuple[str, str], Mapping[int, Trace]]  # by method and stream, then by seed; without lost ones
    facts: Mapping[str, Sequence[Item]]  # lists by their heading: protocol, settings, versions
    data: Sequence[Path] = ()  # folders in which the images may be found again
    units: Mapping[tuple[str, int], Unit] = field(default_factory=dict)  # of a benchmark: by stream and seed
    images: Sequence[str] = ()  # of a folder of images: their paths below one of the `data` folders
    events: Sequence[Record] = ()  # of the guard: method, batch, action, reason, alarm, and how many images were seen
    guarded: bool = False
    notes: Sequence[str] = ()

    def __post_init__(self) -> None:
        self.methods = tuple(dict.fromkeys(str(row["label"]) for row in self.rows))
        self.sizes = {str(row["stream"]): int(row["n"]) for row in self.rows}  # images by stream
        self.streams = tuple(self.sizes)
        self.labelled = any(row.get("accuracy") is not None for row in self.rows)
        by_method = {row["method"]: row["label"] for row in reversed(self.rows)}
        self.reference: str | None = SOURCE if SOURCE in self.methods else by_method.get(SOURCE)
        """The method that the others are compared with: the source model."""
        for (_, stream), by_seed in self.traces.items():
            known = self.traces.get((self.reference or "", stream), {})
            any_seed = next(iter(known.values()), None) if self.images else None  # for a folder all are alike
            for seed, trace in by_seed.items():
                if (source := known.get(seed, any_seed)) is not None:
                    places = pd.Index(source.image).get_indexer(pd.Index(trace.image))
                    trace.source = np.where(places >= 0, source.prediction[places], UNKNOWN)

    def first(self, method: str, stream: str) -> Trace | None:
        """Return the predictions of a method on a stream with its first seed."""
        return next(iter(self.traces.get((method, stream), {}).values()), None)


@dataclass(frozen=True)
class Run:
    """What was found at one path."""

    name: str
    status: str  # in a few words how much is finished
    experiments: tuple[Experiment, ...] = ()
    problems: Sequence[Item] = ()
    files: Sequence[Any] = ()  # of `dpl adapt`: the predictions files

    @property
    def whole(self) -> bool:
        """Whether nothing is missing or damaged."""
        return bool(self.experiments) and not self.problems


class _CheckedStore(Store):
    """A store to read: a unit counts as done if its figures match their checksums, even if its predictions are lost."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.sound: dict[str, Unit] = {}
        draft = "a draft: its process was ended while it was writing; the unit will be run again"
        self.damage = [Item(folder.name, draft) for folder in sorted((root / "units").glob(".*"))]
        for folder in sorted((root / "units").glob("[!.]*")):
            self._check(folder)

    def done(self, unit: Unit) -> bool:
        """Return whether the figures of a unit are those that were written."""
        return unit.key in self.sound

    def _check(self, folder: Path) -> None:
        unit, marks, arrays = None, read_json(folder / "done"), "predictions.npz"
        names = ("unit.json", "results.jsonl", arrays)
        faults = {name: fault for name in names if (fault := _fault(folder / name, marks.get(name)))}
        if not marks:
            faults = {"done": "the mark of completion is missing"}
        try:
            unit = Unit.from_record(read_json(folder / "unit.json"))
            if unit.key != folder.name:
                faults["unit.json"] = "describes a different unit than the name of its folder"
        except (TypeError, DplError):
            faults.setdefault("unit.json", "not a unit that this version reads")
        if unit is not None and faults.keys() <= {arrays}:
            self.sound[unit.key] = unit
        title = folder.name if unit is None else f"{unit.title} ({folder.name})"
        shown = "; its figures are shown, its curves and images cannot be" if folder.name in self.sound else ""
        self.damage += [Item(title, f"{file}: {fault}{shown}") for file, fault in faults.items()]


def _fault(path: Path, mark: Any) -> str:
    """Return what is wrong with a file of a unit."""
    try:
        data = path.read_bytes()
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    if not isinstance(mark, dict) or len(data) != mark.get("bytes"):
        return f"{len(data):,} bytes instead of {mark and mark.get('bytes')}"
    if hashlib.sha256(data).hexdigest() != mark.get("sha256"):
        return "its content is not what was written (other checksum)"
    return ""


def read_store(root: Path, data: Path | None) -> Run:
    """Return the run in a results folder: whole, half-finished, damaged or empty."""
    store, requests = _CheckedStore(root), []
    problems = store.damage
    try:
        requests = read_requests(root)
    except DataError as error:
        problems.append(Item("plan", str(error).replace(str(root), root.name)))
    cells = _cells(requests, store)
    problems += _missing(cells if requests else [], store)
    groups = grouped((repr((c.section, *_shared(c.candidates[0].target))), c) for c in cells if complete(c, store))
    folder = data or next((Path(r.data) for r in reversed(requests) if Path(r.data).is_dir()), None)
    experiments = tuple(_experiment(members, store, folder) for members in groups.values())
    done, told = sum(map(len, groups.values())), merged(problems)
    status = f"{done:,} of {len(cells):,} finished" if requests else f"{done:,} finished"
    if told:
        status += f", {len(told)} {'problem' if len(told) == 1 else 'problems'}"
    return Run(requests[-1].title if requests else root.resolve().name, status, experiments, told)


def _cells(requests: Sequence[StoredRequest], store: _CheckedStore) -> list[Cell]:
    """Return what was requested, each cell once, then what is stored without a request."""
    cells = {(c.section, c.label, tuple(u.key for u in c.units())): c for request in requests for c in request.cells}
    requested = {unit.key for cell in cells.values() for unit in cell.units()}
    rest = [unit for key, unit in store.sound.items() if key not in requested and unit.part != "outside"]
    unplanned = []
    for members in grouped((repr(_shared(unit)), unit) for unit in rest).values():
        labels = labels_of([(unit.method, {**unit.settings, "batch_size": unit.batch_size}) for unit in members])
        for unit, label in zip(members, labels, strict=True):
            source = unit.trained_on[0] if len(unit.trained_on) == 1 else None
            unplanned.append(Cell(unit.dataset, label, unit.seed, (Candidate({}, unit),), source))
    unplanned.sort(key=lambda cell: (cell.candidates[0].target.method != SOURCE, cell.label))
    return [*cells.values(), *unplanned]


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
    """Return which units failed and why, and which other cells are not complete."""
    paths = [path for path in (store.root / "failures").glob("[!.]*.json") if path.stem not in store.sound]
    failed = {path.stem: read_json(path) for path in sorted(paths)}
    reasons = [Item(str(note.get("unit", key)), f"failed: {note.get('reason')}") for key, note in failed.items()]
    waiting = grouped(
        (cell.label, cell.candidates[0].target.stream_title)
        for cell in planned
        if not complete(cell, store) and not any(unit.key in failed for unit in cell.units())
    )
    return reasons + [Item(label, f"not run yet: {shorten(streams)}") for label, streams in waiting.items()]


def _experiment(cells: Sequence[Cell], store: _CheckedStore, data: Path | None) -> Experiment:
    rows = [dict(row) | {"stream": _stream(row)} for row in cell_rows(cells, store)]
    units = {unit.key: unit for unit in (chosen(cell, store).target for cell in cells)}
    how = how_measured(rows)
    versions = ", ".join(how["versions"])
    first = cells[0].candidates[0].target
    return Experiment(
        title=f"{cells[0].section}: {first.protocol.replace('_', ' ')}, {first.network}",
        classes=tuple(rows[0]["classes"]),
        rows=rows,
        traces=_store_traces(cells, store),
        facts={"Protocol": how["protocol"], "Settings": how["settings"], "Versions": [Item("", versions)]},
        data=[] if data is None else [data],
        units={(row["stream"], row["seed"]): units[row["unit"]] for row in rows},
        notes=list(dict.fromkeys(note for row in rows for note in row["data_notes"])),
    )


def _store_traces(cells: Sequence[Cell], store: _CheckedStore) -> dict[tuple[str, str], dict[int, Trace]]:
    traces: dict[tuple[str, str], dict[int, Trace]] = {}
    for cell in cells:
        unit = chosen(cell, store).target
        try:
            arrays = store.predictions(unit)
            image = (arrays["domain"].astype(np.int64) << 32) + arrays["sample"].astype(np.int64)
            label, prediction = arrays["label"].astype(np.int64), arrays["prediction"].astype(np.int64)
            whole, segment = make_trace(image, label, prediction, arrays["confidence"]), arrays["segment"]
        except (DataError, KeyError):  # is among the damage, or was written by an early version
            continue
        for number, row in enumerate(cell_rows([cell], store)):
            traces.setdefault((cell.label, _stream(row)), {})[cell.seed] = whole[segment == number]
    return traces


def _stream(row: Row) -> str:
    """Return the name of a segment; a repeated one has the number of its visit."""
    name, visit = str(row["column"]).replace("->", "→"), row.get("visit") or 0
    return f"{name} (visit {visit + 1})" if visit else name
