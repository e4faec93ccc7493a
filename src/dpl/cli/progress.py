"""What `dpl bench` shows while it runs: a table that fills on a terminal, a line now and then elsewhere."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from dpl.bench import Cell, Store, UnitProgress
from dpl.bench.engine import OnProgress
from dpl.bench.run import unit_accuracy
from dpl.cli.console import can_draw, rich_table, warn

__all__ = ["watched"]

_LINES = 20  # at most about so many are printed where there is no terminal
_COLUMNS = ("section", "method", "runs", "accuracy %", "ms/image", "now")


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

    def note(self, progress: UnitProgress) -> None:
        """Take in what happened to one of the method's units."""
        if progress.error is not None:
            self.failed += 1
        elif progress.ended:
            self.done, self.accuracy, self.now = self.done + 1, self.accuracy + progress.accuracy, ""
            self.images, self.seconds = self.images + progress.images, self.seconds + progress.seconds
        else:
            domains = ",".join(progress.unit.domains)[:24]
            self.now = f"{domains}: {progress.accuracy:.1f} % of {progress.images:,}"


class _ProgressTable:
    """One line for each method of each section."""

    def __init__(self, title: str, cells: Sequence[Cell], store: Store) -> None:
        self._title = title
        self._lines: dict[tuple[str, str], _Line] = {}
        self._lines_of: dict[str, list[_Line]] = {}
        for cell in cells:
            line = self._lines.setdefault((cell.section, cell.label), _Line(cell.section, cell.label))
            for unit in cell.units():
                line.units += 1
                self._lines_of.setdefault(unit.key, []).append(line)
                if store.done(unit):
                    line.done += 1
                    line.accuracy += unit_accuracy(store.records(unit))
        self._missing, self._printed = self._left(), 0

    def note(self, progress: UnitProgress) -> None:
        """Take in what happened to a unit."""
        for line in self._lines_of[progress.unit.key]:
            line.note(progress)

    def drawn(self) -> Any:
        """Return the table for rich."""
        return rich_table(_COLUMNS, [line.texts() for line in self._lines.values()], self._title)

    def print_line(self, progress: UnitProgress) -> None:
        """Print a line for each unit, or for each twentieth of the way where there are many."""
        self.note(progress)
        gone = self._missing - self._left()
        part = _LINES * gone // max(self._missing, 1)
        if progress.ended and (progress.error is not None or self._missing <= _LINES or part > self._printed):
            self._printed = part
            speed = f"{1000 * progress.seconds / max(progress.images, 1):.1f} ms/image"
            outcome = progress.error or f"{progress.accuracy:.1f} %, {speed}"
            labels = ", ".join(dict.fromkeys(line.label for line in self._lines_of[progress.unit.key]))
            warn(f"{gone}/{self._missing} {labels} on {progress.unit.stream_title}: {outcome}")

    def _left(self) -> int:
        """Return how many units are still to be run."""
        return sum(line.units - line.done for line in self._lines.values())


@contextmanager
def watched(title: str, cells: Sequence[Cell], store: Store, quiet: bool) -> Iterator[OnProgress]:
    """Yield a function that takes the progress of units and shows it."""
    if quiet:
        yield lambda progress: None
        return
    table = _ProgressTable(title, cells, store)
    if not can_draw(sys.stderr):
        yield table.print_line
        return
    from rich.console import Console
    from rich.live import Live

    with Live(table.drawn(), console=Console(stderr=True), refresh_per_second=4) as live:

        def on_progress(progress: UnitProgress) -> None:
            table.note(progress)
            live.update(table.drawn())

        yield on_progress
