"""Tables and progress on the terminal: a bar where rich is installed, plain lines where it is not or in a pipe."""

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

__all__ = ["print_json", "print_table", "progress", "warn"]


Advance = Callable[[int, str], None]  # takes how many steps are done altogether, and a word on how it goes


def print_json(document: Any) -> None:
    """Print a JSON document."""
    print(json.dumps(document, indent=2))


def warn(message: str) -> None:
    """Print a line to the standard error."""
    print(message, file=sys.stderr)


def print_table(headers: Sequence[str], rows: Sequence[Sequence[str]], title: str = "") -> None:
    """Print a table, each column as wide as its longest cell."""
    widths = [max(map(len, column)) for column in zip(headers, *rows, strict=True)]
    if title:
        print(title)
    for row in [headers, ["-" * width for width in widths], *rows]:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


@contextmanager
def progress(label: str, total: int, quiet: bool = False) -> Iterator[Advance]:
    """Show a progress bar on the standard error inside the block, or a line at each tenth of the way."""
    if quiet:
        yield lambda done, note: None
    elif find_spec("rich") is not None and sys.stderr.isatty():
        from rich import progress as rich
        from rich.console import Console

        ours = (rich.MofNCompleteColumn(), rich.TextColumn("{task.fields[note]}"))
        with rich.Progress(*rich.Progress.get_default_columns(), *ours, console=Console(stderr=True)) as bar:
            task = bar.add_task(label, total=total, note="")
            yield lambda done, note: bar.update(task, completed=done, note=note)
    else:
        printed = set[int]()

        def show(done: int, note: str) -> None:
            if (tenth := 10 * done // max(total, 1)) not in printed:
                printed.add(tenth)
                warn(f"{label}: {done}/{total} {note}".rstrip())

        yield show
