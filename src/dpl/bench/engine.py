"""Run all units of a grid: those that are not done yet, in one process or in several, here or on other machines too."""

import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from dpl.bench.context import Context
from dpl.bench.online import OnlineResult
from dpl.bench.run import run_unit
from dpl.bench.selection import Case, ready
from dpl.bench.spec import Unit
from dpl.bench.store import Store
from dpl.errors import DplError

__all__ = ["Listener", "run_cases"]

_PAUSE = 0.5  # seconds between looks at what another process is doing


@dataclass
class Listener:
    """What to tell while units run: each batch, and each unit's end (with the error, if it failed)."""

    on_batch: Callable[[Unit, OnlineResult], None] = lambda unit, result: None
    on_unit: Callable[[Unit, str | None], None] = lambda unit, error: None
    failed: dict[str, str] = field(default_factory=dict)


def run_cases(
    cases: Iterable[Case], store: Store, context: Context, listener: Listener | None = None
) -> dict[str, str]:
    """Run every unit that is not done and not claimed by another process, until all are done.

    A unit that fails does not stop the others; its error is kept in the store and returned by its key.
    """
    listener = listener or Listener()
    cases = list(cases)
    while waiting := _waiting(cases, store, listener.failed):
        if not any([_run(unit, store, context, listener) for unit in waiting]):
            time.sleep(_PAUSE)  # another process has them
    return listener.failed


def _waiting(cases: list[Case], store: Store, failed: dict[str, str]) -> list[Unit]:
    units = {unit.key: unit for case in cases for unit in ready(case, store)}
    return [unit for key, unit in units.items() if key not in failed]


def _run(unit: Unit, store: Store, context: Context, listener: Listener) -> bool:
    """Run one unit unless another process does; return whether it was run here."""
    with store.claim(unit) as mine:
        if not mine or store.done(unit):
            return False
        error = _attempt(unit, store, context, listener)
    if error is not None:
        listener.failed[unit.key] = error
    listener.on_unit(unit, error)
    return True


def _attempt(unit: Unit, store: Store, context: Context, listener: Listener) -> str | None:
    """Run and store one unit; return what went wrong, if something did."""
    try:
        store.commit(unit, run_unit(unit, context, lambda result: listener.on_batch(unit, result)))
    except OSError:  # a full or vanished disk stops everything: going on would fail for all the rest too
        raise
    except Exception as error:  # one broken method must not cost a night's other results
        store.note_failure(unit, traceback.format_exc())
        return str(error) if isinstance(error, DplError) else f"{type(error).__name__}: {error}"
    return None
