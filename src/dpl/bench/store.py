"""Results on disk: a folder for each unit, which is there when the unit is finished and not before.

    <root>/units/<key>/unit.json        the unit
    <root>/units/<key>/results.jsonl    one record per segment
    <root>/units/<key>/predictions.npz  what was predicted for each image
    <root>/units/<key>/done             sizes and checksums of the above: the commit mark
    <root>/claims/<key>.lock            held while a process runs the unit; the system lifts it when the process ends
    <root>/failures/<key>.json          why the last attempt failed
    <root>/plans/<hash>.json            what was asked for (dpl.bench.plans)

A kill at any moment leaves a folder whole or absent.
"""

import hashlib
import io
import json
import os
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

from dpl.bench.run import Outcome, Record
from dpl.bench.unit import Unit
from dpl.core.errors import DataError
from dpl.core.files import clear_drafts, lock, write_file, write_folder

__all__ = ["Store"]

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
        try:
            note = json.loads((self._failures / f"{unit.key}.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        return str(note["reason"]) if note["time"] >= since else None

    def records(self, unit: Unit) -> list[Record]:
        """Return a finished unit's records, one per segment."""
        with _readable(self._units / unit.key / "results.jsonl") as path:
            return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]

    def predictions(self, unit: Unit) -> dict[str, NDArray[Any]]:
        """Return what was predicted for each image of a finished unit."""
        with (
            _readable(self._units / unit.key / "predictions.npz") as path,
            np.load(path, allow_pickle=False) as archive,
        ):
            return dict(archive)

    def units(self) -> Iterator[Unit]:
        """Yield every finished unit."""
        folders = sorted(self._units.iterdir()) if self._units.is_dir() else []
        for folder in folders:
            if not folder.name.startswith(".") and _is_whole(folder):
                yield Unit.from_record(json.loads((folder / "unit.json").read_text(encoding="utf-8")))

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
