"""Run all units of a grid: those that are not done yet, in this process or in several, here or on other machines.

Every process walks through all cells and runs what nobody else has claimed, so that nothing has to be handed out.
"""

import multiprocessing
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch

from dpl.bench.context import BenchContext
from dpl.bench.run import run_unit, unit_accuracy
from dpl.bench.store import Store, runnable_units
from dpl.bench.unit import Cell, Unit
from dpl.core.allocator import keep_freed_memory
from dpl.core.errors import DplError
from dpl.core.extras import import_modules
from dpl.runs.online import OnlineResult

__all__ = ["GridRun", "IsOver", "OnProgress", "UnitProgress", "prepare_process", "run_in_processes"]

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
IsOver = Callable[[], bool]  # says whether all processes of a group have ended
# Starts so many processes that each run a grid; they end with the block.
StartJobs = Callable[["GridRun", int], AbstractContextManager[IsOver]]


def _tell_nobody(progress: UnitProgress) -> None:
    """Ignore progress; a function with a name, because other processes import it."""


@dataclass(frozen=True)
class GridRun:
    """The cells of one call, what they need, and who is told; all its processes share the time at which it began.

    A unit that fails does not stop the others: its error is noted in the store, and no process of this run tries it
    again.
    """

    cells: Sequence[Cell]
    store: Store
    context: BenchContext
    on_progress: OnProgress = _tell_nobody
    begun: float = field(default_factory=time.time)

    def run(self) -> dict[str, str]:
        """Run every unit that is not done until all are, whoever runs them; return the errors by the unit's key."""
        while self.pending(self.cells):
            ran = False
            for cell in self.cells:  # a unit that is done may decide which of its cell comes next
                while any([self._run(unit) for unit in self.pending([cell])]):
                    ran = True
            if not ran:
                time.sleep(_PAUSE)  # another process has what is left
        return self.failures()

    def run_by_jobs(self, start: StartJobs, jobs: int, retries: int = 0) -> dict[str, str]:
        """Do as `run` with other processes, which share the store; what is left when all have ended is retried."""
        root, context = self.store.root.absolute(), self.context.absolute()
        root.mkdir(parents=True, exist_ok=True)
        run = replace(self, store=Store(root), context=context, on_progress=_tell_nobody)
        left = {unit.key: unit for unit in self._units() if not self._has_ended(unit)}
        for _ in range(retries + 1):
            if count := min(jobs, len(self.pending(self.cells))):
                with start(run, count) as is_over:
                    self._follow(is_over, left)
        if self.pending(self.cells):
            raise DplError(
                f"jobs ended before their work; what was finished is kept, and {root / 'jobs'} has the output of jobs "
                "of Slurm. Run again to resume"
            )
        return self.failures()

    def _follow(self, is_over: IsOver, left: dict[str, Unit]) -> None:
        """Tell how units end that other processes run, and take them out of those that are left."""
        over = False
        while not over:
            time.sleep(_PAUSE)
            over = is_over()
            for unit in [unit for unit in left.values() if self._has_ended(unit)]:
                self._tell_end(unit)
                del left[unit.key]

    def pending(self, cells: Sequence[Cell]) -> list[Unit]:
        """Return the units that may run now, are not done and have not failed."""
        units = [unit for cell in cells for unit in runnable_units(cell, self.store)]
        return [unit for unit in units if not self._has_ended(unit)]

    def failures(self) -> dict[str, str]:
        """Return the reasons of the units that failed, by the unit's key."""
        found = {unit.key: self.store.failure(unit, self.begun) for unit in self._units()}
        return {key: error for key, error in found.items() if error is not None}

    def _units(self) -> Iterator[Unit]:
        return (unit for cell in self.cells for unit in cell.units())

    def _has_ended(self, unit: Unit) -> bool:
        return self.store.done(unit) or self.store.failure(unit, self.begun) is not None

    def _run(self, unit: Unit) -> bool:
        """Run one unit unless another process does or did; return whether it was run here."""

        def on_batch(result: OnlineResult) -> None:
            self.on_progress(UnitProgress(unit, len(result.labels), result.accuracy, result.seconds))

        with self.store.claim(unit) as mine:
            if not mine or self._has_ended(unit):
                return False
            try:
                self.store.commit(unit, run_unit(unit, self.context, on_batch))
            except OSError:  # a full or vanished disk would fail all the others too
                raise
            except Exception as error:  # one broken method must not cost a night's other results
                reason = str(error) if isinstance(error, DplError) else f"{type(error).__name__}: {error}"
                self.store.note_failure(unit, reason, traceback.format_exc())
        self._tell_end(unit)
        return True

    def _tell_end(self, unit: Unit) -> None:
        """Tell how a unit ended, as the store has it."""
        if (error := self.store.failure(unit, self.begun)) is not None:
            self.on_progress(UnitProgress(unit, 0, float("nan"), ended=True, error=error))
            return
        records = self.store.records(unit)
        images = sum(record["n"] for record in records)
        seconds = sum(record["seconds_per_image"] * record["n"] for record in records)
        self.on_progress(UnitProgress(unit, images, unit_accuracy(records), seconds, ended=True))


def run_in_processes(run: GridRun, workers: int, threads: int) -> dict[str, str]:
    """Do as `GridRun.run` with several processes, each with its own threads."""

    @contextmanager
    def start(run: GridRun, count: int) -> Iterator[IsOver]:
        spawn = multiprocessing.get_context("spawn")
        processes = [spawn.Process(target=_work, args=(run, threads), daemon=True) for _ in range(count)]
        for process in processes:
            process.start()
        try:
            yield lambda: not any(process.is_alive() for process in processes)
        finally:
            for process in processes:
                process.terminate()
                process.join()

    return run.run_by_jobs(start, workers)


def _work(run: GridRun, threads: int) -> None:
    prepare_process(threads, run.context.modules)
    with suppress(KeyboardInterrupt):  # the parent reports it for all
        try:
            run.run()
        except OSError as error:
            sys.exit(f"worker: {error}")


def prepare_process(threads: int, modules: Sequence[str]) -> None:
    """Set up a process that runs units only; `modules` of the user's own register methods."""
    import_modules(modules)
    torch.set_num_threads(threads)
    keep_freed_memory()
