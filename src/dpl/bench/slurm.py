"""A grid on a Slurm cluster through submitit: a few jobs that share the store, each running what no other has claimed.

All nodes must see the folders of data, weights and results, as they do in most such clusters. A job that is preempted
or reaches its time limit is queued again by submitit; what a job that died left undone, the next round of jobs does.
"""

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from math import ceil
from pathlib import Path
from typing import Any

from dpl.bench.context import BenchContext
from dpl.bench.engine import ClusterOptions, GridRun, OnProgress, prepare_process
from dpl.bench.selection import Cell
from dpl.bench.store import Store
from dpl.bench.unit import Unit
from dpl.core.errors import DplError, SettingError
from dpl.core.extras import optional
from dpl.core.settings import setting

__all__ = ["SlurmOptions", "run_on_slurm"]

_PAUSE = 1.0  # seconds between two checks of the store
_EXECUTORS = ("slurm", "local", "debug")


@dataclass(frozen=True, kw_only=True)
class SlurmOptions(ClusterOptions):
    """How many jobs, and what each of them asks for; `retries` is how often dead jobs are submitted again."""

    jobs: int = setting(1, "jobs that run at once", low=1)
    hours: float = setting(24.0, "time limit of a job; one that reaches it is queued again", low=0)
    executor: str = setting("slurm", "local runs the same jobs as processes of this machine", choices=_EXECUTORS)
    extra: dict[str, Any] = field(default_factory=dict)
    """Further parameters of submitit, such as `slurm_partition`."""


@dataclass(frozen=True)
class _Job:
    """What a job runs; submitit asks for its checkpoint when the time limit is reached."""

    run: GridRun
    threads: int

    def __call__(self) -> None:
        """Run what no other job has claimed."""
        prepare_process(self.threads)
        self.run.run()

    def checkpoint(self) -> Any:
        """Return the same job: finished units are in the store."""
        return optional("submitit", "slurm").helpers.DelayedSubmission(self)


def run_on_slurm(
    cells: Sequence[Cell], store: Store, context: BenchContext, on_progress: OnProgress = lambda progress: None,
    options: SlurmOptions | None = None,
) -> dict[str, str]:  # fmt: skip
    """Do as `run_cells` with jobs of a Slurm cluster; return the errors by the unit's key."""
    asked = options or SlurmOptions()
    submitit = optional("submitit", "slurm")
    folder = store.root.absolute() / "jobs"
    run = GridRun(cells, store, context, on_progress)
    placed = replace(context.absolute(), device="cuda" if asked.gpus else context.device)
    job = _Job(GridRun(list(cells), Store(store.root.absolute()), placed, begun=run.begun), ceil(asked.cpus))
    left = {unit.key: unit for cell in cells for unit in cell.units() if not store.done(unit)}
    for _ in range(asked.retries + 1):
        if count := min(asked.jobs, len(run.pending())):
            _run_round(_executor(submitit, folder, asked), job, count, run, left)
    if run.pending():
        raise DplError(f"jobs ended before their work; {folder} has their logs. Run again to resume")
    return run.failures()


def _executor(submitit: Any, folder: Path, options: SlurmOptions) -> Any:
    try:
        executor = submitit.AutoExecutor(folder=str(folder), cluster=options.executor)
    except RuntimeError as error:
        raise DplError(f"engine slurm: {error}; is this a machine from which jobs are submitted?") from error
    executor.update_parameters(
        name="dpl-bench", timeout_min=max(1, round(60 * options.hours)), cpus_per_task=ceil(options.cpus),
        gpus_per_node=ceil(options.gpus or 0), tasks_per_node=1, nodes=1,
    )  # fmt: skip
    if options.memory_gb is not None:
        executor.update_parameters(mem_gb=options.memory_gb)
    try:
        executor.update_parameters(**options.extra)
    except (NameError, TypeError, ValueError) as error:
        raise SettingError(f"engine slurm: {str(error).splitlines()[0]}") from error
    return executor


def _run_round(executor: Any, job: _Job, count: int, run: GridRun, left: dict[str, Unit]) -> None:
    """Submit jobs and wait for all of them; they are cancelled where this process is interrupted."""
    with executor.batch():
        submitted = [executor.submit(job) for _ in range(count)]
    try:
        while not all(one.done() for one in submitted):
            _report(run, left)
            time.sleep(_PAUSE)
    finally:
        for one in submitted:
            if not one.done():
                with suppress(RuntimeError, OSError):
                    one.cancel(check=False)
    _report(run, left)


def _report(run: GridRun, left: dict[str, Unit]) -> None:
    """Tell of units that the jobs finished, or that failed, since the last time."""
    for key, unit in list(left.items()):
        if run.tell(unit):
            del left[key]
