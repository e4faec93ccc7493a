"""Run all units of a grid: those that are not done yet, in one process or in several, here or on other machines too.

Every process walks through all cells and runs what nobody else has claimed, so that nothing has to be handed out.
"""

import multiprocessing
import queue
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch

from dpl.bench.context import BenchContext
from dpl.bench.run import Outcome, run_unit, unit_accuracy
from dpl.bench.store import Store, runnable_units
from dpl.bench.unit import Cell, Unit
from dpl.core.allocator import keep_freed_memory
from dpl.core.errors import DplError
from dpl.runs.online import OnlineResult

__all__ = [
    "Failure", "GridRun", "OnProgress", "UnitProgress", "prepare_process", "run_cells", "run_in_processes", "try_unit",
]  # fmt: skip

_PAUSE = 0.5  # seconds between two checks of what other processes do


class UnitProgress(NamedTuple):
    """Something that happened to a unit: a batch was predicted, or the unit ended, well or with an error."""

    unit: Unit
    images: int
    accuracy: float
    seconds: float = 0.0
    ended: bool = False
    error: str | None = None


OnProgress = Callable[[UnitProgress], None]
Failure = tuple[str, str]  # why a unit could not be run, and the details


@dataclass(frozen=True)
class GridRun:
    """The cells of one call, what they need, and who is told; all its processes share the time at which it began.

    A unit that fails does not stop the others: its error is noted in the store, and no process of this run tries it
    again.
    """

    cells: Sequence[Cell]
    store: Store
    context: BenchContext
    on_progress: OnProgress = lambda progress: None
    begun: float = field(default_factory=time.time)

    def run(self, go_on: Callable[[], bool] = lambda: True) -> None:
        """Run every unit that is not done and that no other process has claimed, until all are done."""
        while go_on():
            ran = False
            for cell in self.cells:  # a unit that is done may decide which of its cell comes next
                while any([self._run(unit) for unit in self.pending([cell])]):
                    ran = True
            if not self.pending():
                return
            if not ran:
                time.sleep(_PAUSE)  # another process has what is left

    def pending(self, cells: Sequence[Cell] | None = None) -> list[Unit]:
        """Return the units that may run now, are not done and have not failed."""
        units = [unit for cell in (self.cells if cells is None else cells) for unit in runnable_units(cell, self.store)]
        return [unit for unit in units if self.store.failure(unit, self.begun) is None]

    def failures(self) -> dict[str, str]:
        """Return the reasons of the units that failed, by the unit's key."""
        units = [unit for cell in self.cells for unit in cell.units()]
        return {unit.key: error for unit in units if (error := self.store.failure(unit, self.begun)) is not None}

    @contextmanager
    def claim(self, unit: Unit) -> Iterator[bool]:
        """Yield whether a unit is to be run here: nobody else has it, and it is still to be done."""
        with self.store.claim(unit) as mine:
            yield mine and not self.store.done(unit) and self.store.failure(unit, self.begun) is None

    def _run(self, unit: Unit) -> bool:
        """Run one unit unless another process does or did; return whether it was run here."""
        with self.claim(unit) as mine:
            if mine:
                self.keep(unit, try_unit(unit, self.context, self.on_progress))
        return mine

    def keep(self, unit: Unit, outcome: Outcome | Failure) -> None:
        """Store a unit's results, or why there are none, and tell."""
        if isinstance(outcome, Outcome):
            self.store.commit(unit, outcome)
        else:
            self.store.note_failure(unit, *outcome)
        self.tell(unit)

    def tell(self, unit: Unit) -> bool:
        """Tell how a unit ended, as the store has it; return False if it did not yet."""
        if self.store.done(unit):
            records = self.store.records(unit)
            images = sum(record["n"] for record in records)
            seconds = sum(record["seconds_per_image"] * record["n"] for record in records)
            self.on_progress(UnitProgress(unit, images, unit_accuracy(records), seconds, ended=True))
        elif (error := self.store.failure(unit, self.begun)) is not None:
            self.on_progress(UnitProgress(unit, 0, float("nan"), ended=True, error=error))
        else:
            return False
        return True


def try_unit(unit: Unit, context: BenchContext, on_progress: OnProgress) -> Outcome | Failure:
    """Run one unit and return what came of it."""

    def on_batch(result: OnlineResult) -> None:
        on_progress(UnitProgress(unit, len(result.labels), result.accuracy, result.seconds))

    try:
        return run_unit(unit, context, on_batch)
    except OSError:  # a full or vanished disk would fail all the others too
        raise
    except Exception as error:  # one broken method must not cost a night's other results
        reason = str(error) if isinstance(error, DplError) else f"{type(error).__name__}: {error}"
        return reason, traceback.format_exc()


def run_cells(
    cells: Sequence[Cell], store: Store, context: BenchContext, on_progress: OnProgress = lambda progress: None
) -> dict[str, str]:
    """Run all cells in this process, beside others that use the store; return the errors by the unit's key."""
    run = GridRun(cells, store, context, on_progress)
    run.run()
    return run.failures()


def run_in_processes(run: GridRun, workers: int, threads: int) -> dict[str, str]:
    """Do as `run_cells` with several processes, each with its own threads; events come from all of them."""
    spawn = multiprocessing.get_context("spawn")
    events: Any = spawn.Queue()
    arguments = (replace(run, on_progress=events.put), threads, events)
    processes = [spawn.Process(target=_worker, args=arguments, daemon=True) for _ in range(workers)]
    alive = True
    try:
        for process in processes:
            process.start()
        while alive:
            alive = any(process.is_alive() for process in processes)
            with suppress(queue.Empty):
                while True:
                    run.on_progress(events.get(timeout=_PAUSE if alive else 0))
    finally:
        for process in processes:
            if process.is_alive():
                process.terminate()
            process.join()
    if any(process.exitcode for process in processes):
        raise DplError("a worker process ended before its work; what was finished is kept. Run again to resume")
    return run.failures()


def _worker(run: GridRun, threads: int, events: Any) -> None:
    parent = multiprocessing.parent_process()
    prepare_process(threads)
    try:
        run.run(go_on=lambda: parent is None or parent.is_alive())
    except KeyboardInterrupt:  # the parent reports it for all
        events.cancel_join_thread()
    except OSError as error:
        sys.exit(f"worker: {error}")


def prepare_process(threads: int) -> None:
    """Set up a process that runs units only."""
    torch.set_num_threads(threads)
    keep_freed_memory()
