"""Tables and progress on the terminal: rich where it is installed, plain lines where it is not or in a pipe."""

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any, Protocol

__all__ = ["Advance", "print_json", "print_table", "progress", "warn"]


class Advance(Protocol):
    """Reports progress: how many more units are done, and a word on how it goes."""

    def __call__(self, units: int = 1, note: str = "") -> None:
        """Move the bar."""


def print_json(document: Any) -> None:
    """Print a JSON document."""
    print(json.dumps(document, indent=2))


def warn(message: str) -> None:
    """Print a line to the standard error."""
    print(message, file=sys.stderr)


def print_table(headers: Sequence[str], rows: Sequence[Sequence[str]], title: str = "") -> None:
    """Print a table; the first column is text, the others are figures where they look like it."""
    if find_spec("rich") and sys.stdout.isatty():
        _rich_table(headers, rows, title)
        return
    widths = [max(len(str(row[i])) for row in [headers, *rows]) for i in range(len(headers))]
    if title:
        print(title)
    for row in [headers, ["-" * width for width in widths], *rows]:
        print("  ".join(str(cell).ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


@contextmanager
def progress(label: str, total: int, quiet: bool = False) -> Iterator[Advance]:
    """Show a progress bar on the standard error inside the block."""
    if quiet:
        yield lambda units=1, note="": None
    elif find_spec("rich") and sys.stderr.isatty():
        yield from _rich_bar(label, total)
    else:
        yield from _plain_lines(label, total)


def _rich_table(headers: Sequence[str], rows: Sequence[Sequence[str]], title: str) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title or None, title_justify="left")
    for i, header in enumerate(headers):
        figures = i > 0 and all(str(row[i])[:1].isdigit() or str(row[i])[:1] in "-+–" for row in rows)
        table.add_column(header, justify="right" if figures else "left")
    for row in rows:
        table.add_row(*map(str, row))
    Console().print(table)


def _rich_bar(label: str, total: int) -> Iterator[Advance]:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
               TimeRemainingColumn(), TextColumn("{task.fields[note]}"))  # fmt: skip
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(label, total=total, note="")

        def advance(units: int = 1, note: str = "") -> None:
            bar.update(task, advance=units, note=note)

        yield advance


def _plain_lines(label: str, total: int) -> Iterator[Advance]:
    """Print a line at each tenth of the way, so that a log file stays short."""
    done, told = 0, -1

    def advance(units: int = 1, note: str = "") -> None:
        nonlocal done, told
        done += units
        tenth = 10 * done // max(total, 1)
        if tenth > told:
            told = tenth
            print(f"{label}: {done}/{total} {note}".rstrip(), file=sys.stderr)

    yield advance
