"""Read what was measured: parity figures and the rows of all methods."""

import json
from dataclasses import dataclass
from pathlib import Path

__all__ = ["RecordedRun", "Row", "read_all_methods", "read_parity"]

# Recorded runs whose name does not begin with the method's own, once the library's prefix is off.
_ALIASES = {"shotim": "shot_im", "tentprebn": "tent_prebn", "tentclf": "tent", "tentfull": "tent", "plclf": "pl"}
_ALIASES |= {"medbn": "norm", "unmixtns": "norm"}  # rules of norm="..."
_LIBRARIES = ("rmtlib_", "t3alib_", "tsdrepo_", "eata_official_")


@dataclass(frozen=True)
class RecordedRun:
    """One comparison with a recorded run of other code: the largest differences."""

    name: str
    method: str
    code: str
    logits: float
    state: float | None  # None: the method has none


@dataclass(frozen=True)
class Row:
    """One method on the streams of docs/results/all_methods.md."""

    label: str
    figures: tuple[str, ...]


def read_parity(file: Path) -> list[RecordedRun]:
    """Read docs/results/data/parity.json."""
    runs = json.loads(file.read_text())["runs"]
    return [RecordedRun(run["name"], _method(run["name"]), run["code"], run["logits"], run["state"]) for run in runs]


def read_all_methods(page: Path) -> list[Row]:
    """Read the table of docs/results/all_methods.md."""
    lines = [line for line in page.read_text().splitlines() if line.startswith("| ")]
    start = next(number for number, line in enumerate(lines) if line.startswith("| method |"))
    cells = [[cell.strip() for cell in line.strip().strip("|").split(" | ")] for line in lines[start + 1 :]]
    return [Row(label.replace("`", ""), tuple(figures)) for label, *figures in cells]


def _method(run: str) -> str:
    """Return the method that a recorded run belongs to, from its name."""
    for library in _LIBRARIES:
        run = run.removeprefix(library)
    first = run.split("_")[0]
    return run if run == "tast_bn" else _ALIASES.get(first, first)
