"""Hyper-parameters chosen as the paper does: on held-out images of the source domains, never on the target.

Each candidate adapts, from the source model, to the held-out part of every source domain; the mean of the online
accuracies decides, and of equals the earlier candidate wins. The oracle, the candidate that is best on the target,
can be reported beside; nothing depends on it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from dpl.bench.run import unit_accuracy
from dpl.bench.store import Store
from dpl.bench.unit import Unit

__all__ = ["PAPER_GRID", "Candidate", "Cell", "best", "candidates", "chosen", "complete", "oracle", "runnable_units"]

PAPER_GRID: Mapping[str, tuple[Any, ...]] = {"lr": (5e-6, 5e-5, 5e-4), "steps": (1, 2)}


@dataclass(frozen=True)
class Candidate:
    """One choice of settings: the units that judge it, and the unit that it is for."""

    values: Mapping[str, Any]
    target: Unit
    validation: tuple[Unit, ...] = ()


@dataclass(frozen=True)
class Cell:
    """One cell of a table: a method on a stream with a seed, and its candidates (one: nothing to choose)."""

    section: str
    label: str
    seed: int
    candidates: tuple[Candidate, ...]
    source: str | None = None
    """The only source domain, where a table has a column for each pair of source and target."""
    oracle: bool = False
    """Run every candidate on the target too, to show what the best one would have reached."""

    def units(self) -> list[Unit]:
        """Return every unit that may have to run for this cell."""
        return [unit for candidate in self.candidates for unit in (*candidate.validation, candidate.target)]


def candidates(grid: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Return every combination, the last setting varying fastest."""
    return [dict(zip(grid, values, strict=True)) for values in product(*grid.values())]


def best(scores: Sequence[float]) -> int:
    """Return the place of the highest score; of equals the earliest, and one that is no number never wins."""
    return max(range(len(scores)), key=lambda i: (scores[i] == scores[i], scores[i], -i))


def runnable_units(cell: Cell, store: Store) -> list[Unit]:
    """Return the units of a cell that may run now and are not done."""
    if len(cell.candidates) == 1:
        units = [cell.candidates[0].target]
    elif open_units := [u for c in cell.candidates for u in c.validation if not store.done(u)]:
        return open_units
    else:
        first = chosen(cell, store).target
        units = [first, *(c.target for c in cell.candidates if cell.oracle and c.target.key != first.key)]
    return [unit for unit in units if not store.done(unit)]


def complete(cell: Cell, store: Store) -> bool:
    """Say whether everything of a cell is done."""
    return not runnable_units(cell, store)


def chosen(cell: Cell, store: Store) -> Candidate:
    """Return the candidate with the highest mean accuracy on the source domains' held-out images."""
    if len(cell.candidates) == 1:
        return cell.candidates[0]
    scores = [sum(_accuracy(unit, store) for unit in c.validation) / len(c.validation) for c in cell.candidates]
    return cell.candidates[best(scores)]


def oracle(cell: Cell, store: Store) -> Candidate | None:
    """Return the candidate that is best on the target, or None where not all have been run there."""
    if len(cell.candidates) == 1 or not all(store.done(c.target) for c in cell.candidates):
        return None
    return cell.candidates[best([_accuracy(candidate.target, store) for candidate in cell.candidates])]


def _accuracy(unit: Unit, store: Store) -> float:
    return unit_accuracy(store.records(unit))
