"""Run all units of a grid: those that are not done yet, in one process or in several, here or on other machines too.

Every process walks through all cells and runs what nobody else has claimed, so that nothing has to be handed out.
"""

import multiprocessing
import queue
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from typing import Any

import torch

from dpl.bench.context import BenchContext
from dpl.bench.run import Outcome, Record, run_unit, unit_accuracy
from dpl.bench.selection import Cell, runnable_units
from dpl.bench.store import Store
from dpl.bench.unit import Unit
from dpl.core.allocator import keep_freed_memory
from dpl.core.errors import DplError
from dpl.core.settings import Checked, setting
from dpl.runs.online import OnlineResult

__all__ = [
    "ClusterOptions", "OnProgress", "UnitFailure", "UnitProgress", "failures", "finished", "pending_units",
    "record_result", "run_cells", "run_in_processes", "try_unit",
]  # fmt: skip

_PAUSE = 0.5  # seconds between two checks of what other processes do


@dataclass(frozen=True)
class UnitProgress:
    """Something that happened to a unit: a batch was predicted, or the unit ended, well or with an error."""

    unit: Unit
    images: int
    accuracy: float
    seconds: float = 0.0
    ended: bool = False
    error: str | None = None


@dataclass(frozen=True)
class UnitFailure:
    """Why a unit could not be run."""

    reason: str
    details: str


OnProgress = Callable[[UnitProgress], None]


@dataclass(frozen=True, kw_only=True)
class ClusterOptions(Checked):
    """What a run asks of a cluster."""

    cpus: float = setting(1.0, "cores of a run", low=0.01)
    gpus: float | None = setting(None, "GPUs of a run, or a fraction; None: the engine's default", low=0)
    memory_gb: float | None = setting(None, "memory of a run; None: not counted, or the cluster's default", low=0)
    retries: int = setting(3, "how often a run is retried whose process or node died", low=0)


def run_cells(
    cells: Sequence[Cell], store: Store, context: BenchContext, on_progress: OnProgress = lambda progress: None, *,
    since: float | None = None, go_on: Callable[[], bool] = lambda: True,
) -> dict[str, str]:  # fmt: skip
    """Run every unit that is not done and that no other process has claimed, until all are done.

    A unit that fails does not stop the others: its error is noted in the store, the unit is not tried again by any
    process of this run (which began at `since`), and the errors are returned by the unit's key.
    """
    begun = time.time() if since is None else since
    while go_on():
        ran = [_run_cell(cell, store, context, on_progress, begun) for cell in cells]
        if not any(pending_units(cell, store, begun) for cell in cells):
            break
        if not any(ran):
            time.sleep(_PAUSE)  # another process has what is left
    return failures(cells, store, begun)


def failures(cells: Sequence[Cell], store: Store, begun: float) -> dict[str, str]:
    """Return the reasons of the units that failed since the run began, by the unit's key."""
    units = {unit.key: unit for cell in cells for unit in cell.units()}
    return {key: error for key, unit in units.items() if (error := store.failure(unit, begun)) is not None}


def _run_cell(cell: Cell, store: Store, context: BenchContext, on_progress: OnProgress, begun: float) -> bool:
    """Run what a cell has ready, until other processes run the rest; return whether anything was run."""
    ran = False
    while units := pending_units(cell, store, begun):
        if not any([_run(unit, store, context, on_progress, begun) for unit in units]):
            return ran
        ran = True
    return ran


def pending_units(cell: Cell, store: Store, begun: float) -> list[Unit]:
    """Return the units of a cell that may run now, are not done and have not failed since the run began."""
    return [unit for unit in runnable_units(cell, store) if store.failure(unit, begun) is None]


def _run(unit: Unit, store: Store, context: BenchContext, on_progress: OnProgress, begun: float) -> bool:
    """Run one unit unless another process does or did; return whether it was run here."""
    with store.claim(unit) as mine:
        if not mine or store.done(unit) or store.failure(unit, begun) is not None:
            return False
        on_progress(record_result(unit, store, try_unit(unit, context, on_progress)))
    return True


def try_unit(unit: Unit, context: BenchContext, on_progress: OnProgress) -> Outcome | UnitFailure:
    """Run one unit and return what came of it."""

    def on_batch(result: OnlineResult) -> None:
        on_progress(UnitProgress(unit, len(result.labels), result.accuracy, result.seconds))

    try:
        return run_unit(unit, context, on_batch)
    except OSError:  # a full or vanished disk would fail all the others too
        raise
    except Exception as error:  # one broken method must not cost a night's other results
        reason = str(error) if isinstance(error, DplError) else f"{type(error).__name__}: {error}"
        return UnitFailure(reason, traceback.format_exc())


def record_result(unit: Unit, store: Store, outcome: Outcome | UnitFailure) -> UnitProgress:
    """Store a unit's results, or why there are none."""
    if isinstance(outcome, UnitFailure):
        store.note_failure(unit, outcome.reason, outcome.details)
        return UnitProgress(unit, 0, float("nan"), ended=True, error=outcome.reason)
    store.commit(unit, outcome)
    return finished(unit, outcome.records)


def finished(unit: Unit, records: Sequence[Record]) -> UnitProgress:
    """Return the last progress of a unit that has its results."""
    images = sum(record["n"] for record in records)
    seconds = sum(record["seconds_per_image"] * record["n"] for record in records)
    return UnitProgress(unit, images, unit_accuracy(records), seconds, ended=True)


def run_in_processes(
    cells: Sequence[Cell], store: Store, context: BenchContext, workers: int, threads: int, on_progress: OnProgress
) -> dict[str, str]:
    """Do as `run_cells` with several processes, each with its own threads; events come from all of them."""
    begun = time.time()
    spawn = multiprocessing.get_context("spawn")
    events: Any = spawn.Queue()
    arguments = (list(cells), store, context, threads, begun, events)
    processes = [spawn.Process(target=_worker, args=arguments, daemon=True) for _ in range(workers)]
    try:
        for process in processes:
            process.start()
        _listen(processes, events, on_progress)
    finally:
        for process in processes:
            if process.is_alive():
                process.terminate()
            process.join()
    if any(process.exitcode for process in processes):
        raise DplError("a worker process ended before its work; what was finished is kept. Run again to resume")
    return run_cells(cells, store, context, on_progress, since=begun)  # collects failures; nothing is left to run


def _listen(processes: Sequence[BaseProcess], events: Any, on_progress: OnProgress) -> None:
    while True:
        alive = any(process.is_alive() for process in processes)
        try:
            while True:
                on_progress(events.get(timeout=_PAUSE if alive else 0))
        except queue.Empty:
            if not alive:
                return


def _worker(cells: list[Cell], store: Store, context: BenchContext, threads: int, begun: float, events: Any) -> None:
    parent = multiprocessing.parent_process()
    keep_freed_memory()
    torch.set_num_threads(threads)
    try:
        run_cells(cells, store, context, events.put, since=begun, go_on=lambda: parent is None or parent.is_alive())
    except KeyboardInterrupt:  # the parent reports it for all
        events.cancel_join_thread()
    except OSError as error:
        sys.exit(f"worker: {error}")
