"""What was asked for, kept beside the results, so that a reader can tell a finished run from half of one.

<root>/plans/<hash>.json    title, the folder of the images, and every case with its units; one file for each request
"""

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dpl.bench.selection import Candidate, Case
from dpl.bench.unit import Unit
from dpl.core.errors import DataError

__all__ = ["Plan", "read_plans", "write_plan"]

FORMAT = 1


@dataclass(frozen=True)
class Plan:
    """One request."""

    title: str
    data: str
    """Folder of the data sets on the machine that ran it."""
    cases: tuple[Case, ...]


def write_plan(root: Path, plan: Plan) -> Path:
    """Keep a request below a store's folder; the same request is kept once."""
    units = {unit.key: unit.record() for case in plan.cases for unit in case.units()}
    content = {"format": FORMAT, "title": plan.title, "data": plan.data, "cases": [_case(case) for case in plan.cases]}
    text = json.dumps(content | {"units": units}, separators=(",", ":"))
    path = root / "plans" / f"{hashlib.sha256(text.encode()).hexdigest()[:24]}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    draft.write_text(text, encoding="utf-8")
    os.replace(draft, path)
    return path


def _case(case: Case) -> dict[str, Any]:
    return {
        "section": case.section,
        "label": case.label,
        "seed": case.seed,
        "source": case.source,
        "oracle": case.oracle,
        "candidates": [
            {"values": dict(c.values), "target": c.target.key, "validation": [u.key for u in c.validation]}
            for c in case.candidates
        ],
    }


def read_plans(root: Path) -> list[Plan]:
    """Return every request of a store, the oldest first; a file that cannot be read is an error."""
    paths = sorted((root / "plans").glob("[!.]*.json"), key=lambda path: (path.stat().st_mtime_ns, path.name))
    return [_read(path) for path in paths]


def _read(path: Path) -> Plan:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        units = {key: Unit.from_record(record) for key, record in content["units"].items()}
        cases = tuple(_case_from(record, units) for record in content["cases"])
        return Plan(content["title"], content["data"], cases)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{path}: not a readable plan ({error}); remove it, the results do not need it") from error


def _case_from(record: Mapping[str, Any], units: Mapping[str, Unit]) -> Case:
    candidates: Sequence[Mapping[str, Any]] = record["candidates"]
    return Case(
        section=record["section"],
        label=record["label"],
        seed=record["seed"],
        candidates=tuple(
            Candidate(c["values"], units[c["target"]], tuple(units[key] for key in c["validation"])) for c in candidates
        ),
        source=record["source"],
        oracle=record["oracle"],
    )
