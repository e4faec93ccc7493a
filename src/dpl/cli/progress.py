"""What `dpl bench` shows while it runs: a table that fills itself on a terminal, a line now and then elsewhere."""

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

    def cells(self) -> list[str]:
        """Return the line of the table."""
        mean = f"{self.accuracy / self.done:.1f}" if self.done else "-"
        speed = f"{1000 * self.seconds / self.images:.1f}" if self.images else "-"
        state = f"{self.failed} failed" if self.failed else self.now
        return [self.section, self.label, f"{self.done}/{self.units}", mean, speed, state]


class _Board:
    """All lines, and which unit belongs to which."""

    def __init__(self, cells: "Sequence[Cell]", store: "Store") -> None:
        self.lines: dict[tuple[str, str], _Line] = {}
        self._of: dict[str, list[_Line]] = {}
        for cell in cells:
            line = self.lines.setdefault((cell.section, cell.label), _Line(cell.section, cell.label))
            for unit in cell.units():
                line.units += 1
                self._of.setdefault(unit.key, []).append(line)
                if store.done(unit):
                    records = store.records(unit)
                    line.done += 1
                    line.accuracy += sum(record["accuracy"] for record in records) / len(records)

    @property
    def left(self) -> int:
        """How many units are still to be run."""
        return sum(line.units - line.done for line in self.lines.values())

    def labels(self, unit: "Unit") -> str:
        """Return the names of the rows that a unit belongs to."""
        return ", ".join(dict.fromkeys(line.label for line in self._of[unit.key]))

    def note(self, event: "UnitProgress") -> None:
        """Take in an event."""
        for line in self._of[event.unit.key]:
            if event.error is not None:
                line.failed += 1
            elif event.ended:
                line.done, line.accuracy, line.now = line.done + 1, line.accuracy + event.accuracy, ""
                line.images, line.seconds = line.images + event.images, line.seconds + event.seconds
            else:
                place = ",".join(event.unit.domains)[:24]
                where = f" on {event.place}" if event.place else ""
                line.now = f"{place}: {event.accuracy:.1f} % of {event.images:,}{where}"


@contextmanager
def watched(title: str, cells: "Sequence[Cell]", store: "Store", quiet: bool) -> "Iterator[OnProgress]":
    """Yield a function that takes events and shows them."""
    if quiet:
        yield lambda event: None
        return
    board = _Board(cells, store)
    if find_spec("rich") and sys.stderr.isatty():
        yield from _live(title, board)
    else:
        yield from _plain(board)


def _live(title: str, board: _Board) -> "Iterator[OnProgress]":
    from rich.console import Console
    from rich.live import Live

    with Live(_table(title, board), console=Console(stderr=True), refresh_per_second=4) as live:

        def on_progress(event: "UnitProgress") -> None:
            board.note(event)
            live.update(_table(title, board))

        yield on_progress


def _table(title: str, board: _Board) -> Any:
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for name in ("section", "method", "runs", "accuracy %", "ms/image", "now"):
        table.add_column(name, justify="right" if name in {"runs", "accuracy %", "ms/image"} else "left")
    for line in board.lines.values():
        table.add_row(*line.cells())
    return table


def _plain(board: _Board) -> "Iterator[OnProgress]":
    """Print a line for each unit, or for each tenth of the way where there are many."""
    left, told = board.left, 0

    def on_progress(event: "UnitProgress") -> None:
        nonlocal told
        board.note(event)
        if not event.ended:
            return
        gone = left - board.left
        if event.error is not None or left <= 20 or 20 * gone // left > told:
            told = 20 * gone // max(left, 1)
            outcome = (
                event.error or f"{event.accuracy:.1f} %, {1000 * event.seconds / max(event.images, 1):.1f} ms/image"
            )
            run = f"{board.labels(event.unit)} on {event.unit.stream_title}"
            print(f"{gone}/{left} {run}: {outcome}", file=sys.stderr, flush=True)

    yield on_progress
