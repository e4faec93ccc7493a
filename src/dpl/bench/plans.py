"""What was asked for, kept beside the results, so that a reader can tell a finished run from half of one.

<root>/plans/<hash>.json    title, the folder of the images, and every cell with its units; one file for each request
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dpl.bench.selection import Candidate, Cell
from dpl.bench.unit import Unit
from dpl.core.errors import DataError
from dpl.core.files import write_file

__all__ = ["StoredRequest", "read_requests", "write_request"]

FORMAT = 1


@dataclass(frozen=True)
class StoredRequest:
    """One request."""

    title: str
    data: str
    """Folder of the data sets on the machine that ran it."""
    cells: tuple[Cell, ...]


def write_request(root: Path, request: StoredRequest) -> Path:
    """Keep a request below a store's folder; the same request is kept once."""
    units = {unit.key: unit.record() for cell in request.cells for unit in cell.units()}
    content = {"format": FORMAT, "title": request.title, "data": request.data, "cases": request.cells, "units": units}
    text = json.dumps(content, separators=(",", ":"), default=_plain)
    path = root / "plans" / f"{hashlib.sha256(text.encode()).hexdigest()[:24]}.json"
    return write_file(path, text)


def _plain(value: Cell | Candidate | Unit) -> Any:
    """Return a unit as its key, a cell or a candidate as its fields."""
    return value.key if isinstance(value, Unit) else vars(value)


def read_requests(root: Path) -> list[StoredRequest]:
    """Return every request of a store, the oldest first; a file that cannot be read is an error."""
    paths = sorted((root / "plans").glob("[!.]*.json"), key=lambda path: (path.stat().st_mtime_ns, path.name))
    return [_read(path) for path in paths]


def _read(path: Path) -> StoredRequest:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        units = {key: Unit.from_record(record) for key, record in content["units"].items()}
        cells = tuple(_cell(record, units) for record in content["cases"])
        return StoredRequest(content["title"], content["data"], cells)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{path}: not a readable plan ({error}); remove it, the results do not need it") from error


def _cell(record: Mapping[str, Any], units: Mapping[str, Unit]) -> Cell:
    candidates = tuple(
        Candidate(c["values"], units[c["target"]], tuple(units[key] for key in c["validation"]))
        for c in record["candidates"]
    )
    return Cell(**{**record, "candidates": candidates})
