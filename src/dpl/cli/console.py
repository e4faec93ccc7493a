"""Tables and progress on the terminal: rich where it is installed, plain lines where it is not or in a pipe."""

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from typing import IO, Any

__all__ = ["Advance", "can_draw", "print_json", "print_table", "progress", "warn"]


Advance = Callable[[int, str], None]  # takes how many steps are done altogether, and a word on how it goes


def print_json(document: Any) -> None:
    """Print a JSON document."""
    print(json.dumps(document, indent=2))


def warn(message: str) -> None:
    """Print a line to the standard error."""
    print(message, file=sys.stderr)


def can_draw(file: IO[str]) -> bool:
    """Say whether a file is a terminal on which rich can draw."""
    return find_spec("rich") is not None and file.isatty()


def print_table(headers: Sequence[str], rows: Sequence[Sequence[str]], title: str = "") -> None:
    """Print a table; the first column is text, the others are figures where they look like it."""
    if can_draw(sys.stdout):
        from rich.console import Console
        from rich.table import Table

        table = Table(title=title or None, title_justify="left")
        for i, header in enumerate(headers):  # columns of figures end at the right
            figures = i > 0 and all(str(row[i])[:1].isdigit() or str(row[i])[:1] in "-+–" for row in rows)
            table.add_column(header, justify="right" if figures else "left")
        for row in rows:
            table.add_row(*map(str, row))
        Console().print(table)
        return
    widths = [max(len(str(cell)) for cell in column) for column in zip(headers, *rows, strict=True)]
    if title:
        print(title)
    for row in [headers, ["-" * width for width in widths], *rows]:
        print("  ".join(str(cell).ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


@contextmanager
def progress(label: str, total: int, quiet: bool = False) -> Iterator[Advance]:
    """Show a progress bar on the standard error inside the block, or a line at each tenth of the way."""
    if quiet:
        yield lambda done, note: None
    elif can_draw(sys.stderr):
        from rich import progress as rich
        from rich.console import Console

        note_column = rich.TextColumn("{task.fields[note]}")
        columns = (*rich.Progress.get_default_columns(), rich.MofNCompleteColumn(), rich.TimeElapsedColumn())
        with rich.Progress(*columns, note_column, console=Console(stderr=True)) as bar:
            task = bar.add_task(label, total=total, note="")
            yield lambda done, note: bar.update(task, completed=done, note=note)
    else:
        printed = set[int]()

        def show(done: int, note: str) -> None:
            if (tenth := 10 * done // max(total, 1)) not in printed:
                printed.add(tenth)
                warn(f"{label}: {done}/{total} {note}".rstrip())

        yield show
