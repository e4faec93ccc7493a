"""What `dpl bench` and `dpl reproduce` show while they run: how many units are done, and the latest result."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from dpl.bench import Cell, Store, UnitProgress
from dpl.bench.engine import OnProgress
from dpl.cli.console import progress

__all__ = ["watched"]


@contextmanager
def watched(title: str, cells: Sequence[Cell], store: Store, quiet: bool) -> Iterator[OnProgress]:
    """Yield a function that takes the progress of units and shows it."""
    labels: dict[str, dict[str, None]] = {}  # of the rows that need a unit, by its key
    for cell in cells:
        for unit in cell.units():
            labels.setdefault(unit.key, {})[cell.label] = None
    missing = {unit.key for cell in cells for unit in cell.units() if not store.done(unit)}
    total = len(missing)
    with progress(title, total, quiet) as advance:

        def on_progress(seen: UnitProgress) -> None:
            if seen.ended and seen.error is None:
                missing.discard(seen.unit.key)
            speed = f"{1000 * seen.seconds / max(seen.images, 1):.1f} ms/image"
            outcome = seen.error or f"{seen.accuracy:.1f} %, {speed}"
            methods = ", ".join(labels[seen.unit.key])
            advance(total - len(missing), f"{methods} on {seen.unit.stream_title}: {outcome}")

        yield on_progress
