"""Results on disk, what they decide of a cell, and what was asked for.

A kill at any moment leaves a unit's folder whole or absent; docs/reference/files.md lists the files. Settings are
chosen on held-out images of the source domains, never on the target (docs/bench.md); nothing depends on the oracle.
"""

import hashlib
import io
import json
import os
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

from dpl.bench.run import Outcome, Record, unit_accuracy
from dpl.bench.unit import Candidate, Cell, Unit
from dpl.core.errors import DataError
from dpl.core.files import clear_drafts, lock, read_json, write_file, write_folder

__all__ = [
    "Store", "StoredRequest", "best", "chosen", "complete", "oracle", "read_requests", "runnable_units",
    "write_request",
]  # fmt: skip

_FILES = ("unit.json", "results.jsonl", "predictions.npz")


class Store:
    """The results below one folder; many processes may use it at once."""

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = Path(root)
        self._units = self.root / "units"
        self._claims = self.root / "claims"
        self._failures = self.root / "failures"
        self._known: set[str] = set()

    def done(self, unit: Unit) -> bool:
        """Say whether a unit's results are there and whole."""
        if unit.key not in self._known and _is_whole(self._units / unit.key):
            self._known.add(unit.key)
        return unit.key in self._known

    def commit(self, unit: Unit, outcome: Outcome) -> Path:
        """Write a unit's results; they appear all at once."""
        target, archive = self._units / unit.key, io.BytesIO()
        np.savez_compressed(archive, **outcome.arrays)  # type: ignore[arg-type]
        files = {
            "unit.json": json.dumps(unit.record(), indent=1).encode(),
            "results.jsonl": "".join(json.dumps(record) + "\n" for record in outcome.records).encode(),
            "predictions.npz": archive.getvalue(),
        }
        marks = {name: {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()} for name, data in files.items()}
        if not _is_whole(target):  # the first of two commits stays
            write_folder(target, files | {"done": json.dumps(marks).encode()})
        (self._failures / f"{unit.key}.json").unlink(missing_ok=True)
        return target

    @contextmanager
    def claim(self, unit: Unit) -> Iterator[bool]:
        """Yield whether the unit is this process's to run; nobody else gets it inside the block."""
        self._claims.mkdir(parents=True, exist_ok=True)
        path = self._claims / f"{unit.key}.lock"
        with lock(path, wait=False) as mine:
            if mine:
                clear_drafts(self._units, unit.key)  # of a process that was killed while it wrote
            try:
                yield mine
            finally:
                if mine:  # while it is locked
                    path.unlink(missing_ok=True)

    def note_failure(self, unit: Unit, reason: str, details: str) -> None:
        """Keep the reason why a unit could not be run."""
        note = {"unit": unit.title, "reason": reason, "time": time.time(), "details": details}
        write_file(self._failures / f"{unit.key}.json", json.dumps(note, indent=1))

    def failure(self, unit: Unit, since: float) -> str | None:
        """Return why a unit failed since that time, None if it did not."""
        note = read_json(self._failures / f"{unit.key}.json")
        return str(note["reason"]) if note and note["time"] >= since else None

    def records(self, unit: Unit) -> list[Record]:
        """Return a finished unit's records, one per segment."""
        with _readable(self._units / unit.key / "results.jsonl") as path:
            return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]

    def accuracy(self, unit: Unit) -> float:
        """Return a finished unit's online accuracy."""
        return unit_accuracy(self.records(unit))

    def predictions(self, unit: Unit) -> dict[str, NDArray[Any]]:
        """Return what was predicted for each image of a finished unit."""
        with (
            _readable(self._units / unit.key / "predictions.npz") as path,
            np.load(path, allow_pickle=False) as archive,
        ):
            return dict(archive)

    def units(self) -> Iterator[Unit]:
        """Yield every finished unit; those of an earlier rule of `norm="auto"` have another key and are left out."""
        for folder in sorted(self._units.glob("[!.]*")):
            if _is_whole(folder):
                unit = Unit.from_record(json.loads((folder / "unit.json").read_text(encoding="utf-8")))
                if unit.key == folder.name:
                    yield unit

    def rows(self, **wanted: Any) -> list[Record]:
        """Return every stored segment as one flat row: the unit's fields, then the record's; `wanted` filters."""
        rows = [unit.record() | record for unit in self.units() for record in self.records(unit)]
        return [row for row in rows if all(row.get(name) == value for name, value in wanted.items())]


@contextmanager
def _readable(path: Path) -> Iterator[Path]:
    """Say what to do about a file that is missing or damaged."""
    try:
        yield path
    except (OSError, ValueError, BadZipFile, zlib.error) as error:
        raise DataError(f"{path}: cannot be read ({error}); remove its folder to run the unit again") from error


def _is_whole(folder: Path) -> bool:
    """Say whether a folder has its commit mark, and files of the sizes that it names."""
    try:
        marks = json.loads((folder / "done").read_text(encoding="utf-8"))
        return all((folder / name).stat().st_size == marks[name]["bytes"] for name in _FILES)
    except (OSError, ValueError, KeyError, TypeError):
        return False


def best(scores: Sequence[float]) -> int:
    """Return the place of the highest score; of equals the earliest, and one that is no number never wins."""
    return max(range(len(scores)), key=lambda i: (scores[i] == scores[i], scores[i], -i))


def runnable_units(cell: Cell, store: Store) -> list[Unit]:
    """Return the units of a cell that may run now and are not done."""
    if open_units := [u for c in cell.candidates for u in c.validation if not store.done(u)]:
        return open_units
    first = chosen(cell, store).target
    others = [c.target for c in cell.candidates if cell.oracle and c.target.key != first.key]
    return [unit for unit in (first, *others) if not store.done(unit)]


def complete(cell: Cell, store: Store) -> bool:
    """Say whether everything of a cell is done."""
    return not runnable_units(cell, store)


def chosen(cell: Cell, store: Store) -> Candidate:
    """Return the candidate with the highest mean accuracy on the source domains' held-out images."""
    if len(cell.candidates) == 1:
        return cell.candidates[0]
    scores = [sum(store.accuracy(unit) for unit in c.validation) / len(c.validation) for c in cell.candidates]
    return cell.candidates[best(scores)]


def oracle(cell: Cell, store: Store) -> Candidate | None:
    """Return the candidate that is best on the target, or None where not all have been run there."""
    if len(cell.candidates) == 1 or not all(store.done(c.target) for c in cell.candidates):
        return None
    return cell.candidates[best([store.accuracy(candidate.target) for candidate in cell.candidates])]


class StoredRequest(NamedTuple):
    """What was asked for, kept beside the results, so that a reader can tell a finished run from half of one."""

    title: str
    data: str  # folder of the data sets on the machine that ran it
    cells: tuple[Cell, ...]


def write_request(root: Path, request: StoredRequest) -> Path:
    """Keep a request below a store's folder; the same request is kept once."""
    units = {unit.key: unit.record() for cell in request.cells for unit in cell.units()}
    content = {"format": 1, "title": request.title, "data": request.data, "cases": request.cells, "units": units}
    text = json.dumps(content, separators=(",", ":"), default=lambda it: it.key if isinstance(it, Unit) else vars(it))
    return write_file(root / "plans" / f"{hashlib.sha256(text.encode()).hexdigest()[:24]}.json", text)


def read_requests(root: Path) -> list[StoredRequest]:
    """Return every request of a store, the oldest first; a file that cannot be read is an error."""
    found = []
    for path in sorted((root / "plans").glob("[!.]*.json"), key=lambda path: (path.stat().st_mtime_ns, path.name)):
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            units = {key: Unit.from_record(record) for key, record in content["units"].items()}
            cells = tuple(_cell(record, units) for record in content["cases"])
            found.append(StoredRequest(content["title"], content["data"], cells))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise DataError(f"{path}: not a readable plan ({error}); remove it, the results do not need it") from error
    return found


def _cell(record: Mapping[str, Any], units: Mapping[str, Unit]) -> Cell:
    candidates = tuple(
        Candidate(c["values"], units[c["target"]], tuple(units[key] for key in c["validation"]))
        for c in record["candidates"]
    )
    return Cell(**{**record, "candidates": candidates})
