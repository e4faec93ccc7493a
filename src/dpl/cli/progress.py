"""What `dpl bench` shows while it runs: a table that fills on a terminal, a line now and then elsewhere."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dpl.bench import Cell, Store, Unit, UnitProgress
    from dpl.bench.engine import OnProgress

__all__ = ["watched"]

_LINES = 20  # at most about so many are printed where there is no terminal


@dataclass
class _Line:
    """The state of one method of one section."""

    section: str
    label: str
    units: int = 0
    done: int = 0
    failed: int = 0
    accuracy: float = 0.0  # sum over finished units
    images: int = 0
    seconds: float = 0.0
    now: str = ""

    def texts(self) -> list[str]:
        """Return the line of the table."""
        mean = f"{self.accuracy / self.done:.1f}" if self.done else "-"
        speed = f"{1000 * self.seconds / self.images:.1f}" if self.images else "-"
        state = f"{self.failed} failed" if self.failed else self.now
        return [self.section, self.label, f"{self.done}/{self.units}", mean, speed, state]

    def note(self, progress: "UnitProgress") -> None:
        """Take in what happened to one of the method's units."""
        if progress.error is not None:
            self.failed += 1
        elif progress.ended:
            self.done, self.accuracy, self.now = self.done + 1, self.accuracy + progress.accuracy, ""
            self.images, self.seconds = self.images + progress.images, self.seconds + progress.seconds
        else:
            domains = ",".join(progress.unit.domains)[:24]
            self.now = f"{domains}: {progress.accuracy:.1f} % of {progress.images:,}"


class ProgressTable:
    """One line for each method of each section."""

    def __init__(self, cells: "Sequence[Cell]", store: "Store") -> None:
        from dpl.bench.run import unit_accuracy

        self.lines: dict[tuple[str, str], _Line] = {}
        self._lines_of: dict[str, list[_Line]] = {}
        for cell in cells:
            line = self.lines.setdefault((cell.section, cell.label), _Line(cell.section, cell.label))
            for unit in cell.units():
                line.units += 1
                self._lines_of.setdefault(unit.key, []).append(line)
                if store.done(unit):
                    line.done += 1
                    line.accuracy += unit_accuracy(store.records(unit))

    @property
    def left(self) -> int:
        """How many units are still to be run."""
        return sum(line.units - line.done for line in self.lines.values())

    def labels(self, unit: "Unit") -> str:
        """Return the names of the rows that a unit belongs to."""
        return ", ".join(dict.fromkeys(line.label for line in self._lines_of[unit.key]))

    def note(self, progress: "UnitProgress") -> None:
        """Take in what happened to a unit."""
        for line in self._lines_of[progress.unit.key]:
            line.note(progress)


@contextmanager
def watched(title: str, cells: "Sequence[Cell]", store: "Store", quiet: bool) -> "Iterator[OnProgress]":
    """Yield a function that takes the progress of units and shows it."""
    if quiet:
        yield lambda progress: None
        return
    table = ProgressTable(cells, store)
    if find_spec("rich") and sys.stderr.isatty():
        yield from _live(title, table)
    else:
        yield from _plain(table)


def _live(title: str, table: ProgressTable) -> "Iterator[OnProgress]":
    from rich.console import Console
    from rich.live import Live

    with Live(_rich_table(title, table), console=Console(stderr=True), refresh_per_second=4) as live:

        def on_progress(progress: "UnitProgress") -> None:
            table.note(progress)
            live.update(_rich_table(title, table))

        yield on_progress


def _rich_table(title: str, table: ProgressTable) -> Any:
    from rich.table import Table

    shown = Table(title=title, title_justify="left")
    for name in ("section", "method", "runs", "accuracy %", "ms/image", "now"):
        shown.add_column(name, justify="right" if name in {"runs", "accuracy %", "ms/image"} else "left")
    for line in table.lines.values():
        shown.add_row(*line.texts())
    return shown


def _plain(table: ProgressTable) -> "Iterator[OnProgress]":
    """Print a line for each unit, or for each twentieth of the way where there are many."""
    left, printed = table.left, 0

    def on_progress(progress: "UnitProgress") -> None:
        nonlocal printed
        table.note(progress)
        if not progress.ended:
            return
        gone = left - table.left
        part = _LINES * gone // max(left, 1)
        if progress.error is not None or left <= _LINES or part > printed:
            printed = part
            speed = f"{1000 * progress.seconds / max(progress.images, 1):.1f} ms/image"
            outcome = progress.error or f"{progress.accuracy:.1f} %, {speed}"
            run = f"{table.labels(progress.unit)} on {progress.unit.stream_title}"
            print(f"{gone}/{left} {run}: {outcome}", file=sys.stderr, flush=True)

    yield on_progress
