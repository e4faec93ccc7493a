"""What `dpl bench` shows while it runs: a bar with the latest result on a terminal, a line now and then elsewhere."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from dpl.bench import Cell, Store, UnitProgress
from dpl.bench.engine import OnProgress
from dpl.cli.console import can_draw, progress, warn

__all__ = ["watched"]

_LINES = 20  # at most about so many are printed where there is no terminal


@contextmanager
def watched(title: str, cells: Sequence[Cell], store: Store, quiet: bool) -> Iterator[OnProgress]:
    """Yield a function that takes the progress of units and shows it."""
    labels: dict[str, dict[str, None]] = {}  # of the rows that need a unit, by its key
    for cell in cells:
        for unit in cell.units():
            labels.setdefault(unit.key, {})[cell.label] = None
    missing = {unit.key for cell in cells for unit in cell.units() if not store.done(unit)}
    bar, total, printed = can_draw(sys.stderr), len(missing), {0}
    with progress(title, total, quiet or not bar) as advance:

        def on_progress(seen: UnitProgress) -> None:
            if seen.ended and seen.error is None:
                missing.discard(seen.unit.key)
            gone = total - len(missing)
            speed = f"{1000 * seen.seconds / max(seen.images, 1):.1f} ms/image"
            outcome = seen.error or f"{seen.accuracy:.1f} %, {speed}"
            text = f"{', '.join(labels[seen.unit.key])} on {seen.unit.stream_title}: {outcome}"
            advance(gone, text)
            part = _LINES * gone // max(total, 1)
            if seen.ended and not (quiet or bar) and (seen.error or total <= _LINES or part not in printed):
                printed.add(part)
                warn(f"{gone}/{total} {text}")

        yield on_progress
