"""Which units of a store can be trusted, file by file against their checksums, and what is wrong with the others."""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dpl.bench import Store, Unit
from dpl.bench.run import Record
from dpl.core.errors import DplError
from dpl.reproduce.document import Item

__all__ = ["AuditedStore", "is_store"]

_FOLDERS = ("units", "plans", "failures", "claims")
_NEEDED = ("unit.json", "results.jsonl")


def is_store(path: Path) -> bool:
    """Say whether a folder looks like one that `dpl bench` wrote to."""
    return any((path / name).is_dir() for name in _FOLDERS)


class AuditedStore(Store):
    """A store to be read: a unit is there if its figures match their checksums, even if its predictions are lost."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.sound: dict[str, Unit] = {}
        self.broken: list[Item] = []
        for folder in sorted((root / "units").glob("*")):
            self._audit(folder)

    def done(self, unit: Unit) -> bool:
        """Say whether a unit's figures are there and as they were written."""
        return unit.key in self.sound

    def units(self) -> Iterator[Unit]:
        """Yield every unit with trustworthy figures."""
        yield from self.sound.values()

    def begun(self) -> list[str]:
        """Return the keys of units that a process has claimed and not finished."""
        names = (path.stem for path in sorted((self.root / "claims").glob("*.lock")))
        return [name for name in names if name not in self.sound]

    def failures(self) -> dict[str, dict[str, Any]]:
        """Return the notes on failed attempts by the unit's key."""
        found = {}
        for path in sorted((self.root / "failures").glob("[!.]*.json")):
            if path.stem not in self.sound:
                note = _json(path)
                found[path.stem] = note if isinstance(note, dict) else {"reason": "the note cannot be read"}
        return found

    def _audit(self, folder: Path) -> None:
        name = folder.name
        if name.startswith("."):
            self.broken.append(Item(name, "a draft: its process was ended while it wrote; the unit will be run again"))
            return
        marks = _json(folder / "done")
        wrong = _faults(folder, marks) if isinstance(marks, dict) else {"done": "the mark of completion is missing"}
        if not wrong.keys() & {*_NEEDED, "done"}:
            self._take(folder, wrong)
        for file, fault in wrong.items():
            kept = "" if name not in self.sound else "; its figures are shown, its curves and images cannot be"
            self.broken.append(Item(f"{self._title(name)}", f"{file}: {fault}{kept}"))

    def _take(self, folder: Path, wrong: dict[str, str]) -> None:
        try:
            unit = Unit.from_record(json.loads((folder / "unit.json").read_text(encoding="utf-8")))
            records: list[Record] = self._records(folder)
        except (OSError, ValueError, TypeError, DplError) as error:
            wrong["unit.json"] = f"not a unit that this version reads ({error})"
            return
        if unit.key != folder.name:
            wrong["unit.json"] = "it describes another unit than its folder's name says"
        elif not records:
            wrong["results.jsonl"] = "it holds no result"
        else:
            self.sound[unit.key] = unit

    def _title(self, name: str) -> str:
        """Name a unit, also a damaged one whose description is left."""
        try:
            record = json.loads((self.root / "units" / name / "unit.json").read_text(encoding="utf-8"))
            return f"{Unit.from_record(record).title} ({name})"
        except (OSError, ValueError, TypeError, DplError):
            return name


def _faults(folder: Path, marks: dict[str, Any]) -> dict[str, str]:
    """Return what is wrong with each file of a unit."""
    found = {}
    for name in (*_NEEDED, "predictions.npz"):
        try:
            data = (folder / name).read_bytes()
        except OSError as error:
            found[name] = f"cannot be read ({error.strerror})"
            continue
        mark = marks.get(name)
        if not isinstance(mark, dict):
            found[name] = "the mark of completion does not name it"
        elif len(data) != mark.get("bytes"):
            found[name] = f"{len(data):,} bytes instead of {mark.get('bytes'):,}"
        elif hashlib.sha256(data).hexdigest() != mark.get("sha256"):
            found[name] = "its content is not what was written (other checksum)"
    return found


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
