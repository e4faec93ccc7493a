"""A grid on a cluster: on Ray each unit is a task that returns what it found, on Slurm a few jobs share the store.

With Ray this process alone holds the claims and writes, so a unit is committed once, however often it was started.
"""

import math
import os
import platform
import socket
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from dpl import __version__
from dpl.bench.context import BenchContext
from dpl.bench.engine import Failure, GridRun, prepare_process, try_unit
from dpl.bench.run import Outcome
from dpl.bench.store import Store
from dpl.bench.unit import Cell, Unit
from dpl.core.errors import DplError, SettingError
from dpl.core.extras import optional
from dpl.core.settings import Checked, setting

__all__ = ["ClusterOptions", "last_words", "run_on_ray", "run_on_slurm"]

_RAY_PAUSE, _SLURM_PAUSE = 0.25, 1.0  # seconds between two checks of the tasks, or of the store
_TIMEOUT = 10.0  # seconds in which a cluster's head must accept a connection
_AHEAD = 8  # units that are submitted beyond what the cluster can run at once
_MOST_SUBMITTED = 512  # each submitted unit holds one open file, its claim
_LOST = "the node of this command left the Ray cluster; finished runs are kept. Run the same command again to go on"


@dataclass(frozen=True, kw_only=True)
class ClusterOptions(Checked):
    """What a run asks of a Ray or Slurm cluster, and where that is."""

    cpus: float = setting(1.0, "cores of a run", low=0.01)
    gpus: float | None = setting(None, "GPUs of a run, or a fraction; None: one if a Ray cluster has any", low=0)
    memory_gb: float | None = setting(None, "memory of a run; None: not counted, or the cluster's default", low=0)
    retries: int = setting(3, "how often a run whose process or node died, or a round of jobs, is retried", low=0)
    address: str | None = setting(None, "of a running Ray cluster, or auto; None: a new one for this run")
    jobs: int = setting(1, "jobs of Slurm that run at once", low=1)
    hours: float = setting(24.0, "time limit of a job; one that reaches it is queued again", low=0)
    executor: str = setting("slurm", "local: processes of this machine", choices=("slurm", "local", "debug"))
    extra: dict[str, Any] = field(default_factory=dict)  # of submitit, such as `slurm_partition`

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.address is not None and self.address.startswith("ray://"):
            raise SettingError(
                f"address={self.address!r}: Ray's client has no node that sees the data; run this command on a node of "
                "the cluster, with --address auto"
            )


def run_on_ray(run: GridRun, options: ClusterOptions) -> dict[str, str]:
    """Do as `run_cells` on a Ray cluster; return the errors by the unit's key."""
    ray = optional("ray", "ray")
    with last_words(_LOST), ExitStack() as claims, _connected(ray, options) as ours:
        driver = _Driver(ray, run, options, claims)
        try:
            driver.run_all()
        finally:
            if not ours:  # tasks end with their connection, but this one stays
                for reference in driver.submitted:
                    ray.cancel(reference)
    return run.failures()


@contextmanager
def last_words(message: str) -> Iterator[None]:
    """Print a message if this process ends inside the block at once, as Ray ends it when its node dies."""
    code = "import sys; sys.stdin.read() or print(sys.argv[1], file=sys.stderr)"
    with subprocess.Popen(
        [sys.executable, "-S", "-c", code, f"dpl bench: {message}"], stdin=subprocess.PIPE, start_new_session=True
    ) as witness:
        try:
            yield
        finally:
            witness.communicate(b"unwound")


@contextmanager
def _connected(ray: Any, options: ClusterOptions) -> Iterator[bool]:
    """Use the cluster that this process is in, join the one at the address, or start one here.

    Yields whether the connection is ours, to be ended with the block.
    """
    if ray.is_initialized():
        yield False
        return
    local = {"num_cpus": max(os.cpu_count() or 1, math.ceil(options.cpus)), "include_dashboard": False}
    address = options.address or os.environ.get("RAY_ADDRESS")
    host, colon, port = (address or "").rpartition(":")
    try:
        if colon and port.isdecimal():  # Ray itself would try for minutes
            socket.create_connection((host, int(port)), timeout=_TIMEOUT).close()
        ray.init(address or "local", logging_level="ERROR", log_to_driver=False, **({} if address else local))
    except (OSError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
        reason = str(error).strip().splitlines()[0]
        raise DplError(f"address={address!r}: no Ray cluster can be joined there ({reason})") from error
    try:
        yield True
    finally:
        ray.shutdown()


@dataclass
class _Driver:
    """Submits units, waits for them, and stores what comes back."""

    ray: Any
    run: GridRun
    options: ClusterOptions
    claims: ExitStack
    submitted: dict[Any, tuple[Unit, ExitStack]] = field(default_factory=dict)

    def run_all(self) -> None:
        """Run all units that may run, then those that may run after them, until nothing is left."""
        task, arguments = self._task()
        cells_of: dict[str, list[Cell]] = defaultdict(list)
        for cell in self.run.cells:
            for unit in cell.units():
                cells_of[unit.key].append(cell)
        waiting, changed = dict[str, Unit](), self.run.cells
        while True:
            submitted = {unit.key for unit, _ in self.submitted.values()}
            waiting |= {unit.key: unit for unit in self.run.pending(changed) if unit.key not in submitted}
            if not waiting and not self.submitted:
                return
            self._submit(waiting, task, arguments)
            if not self.submitted:
                time.sleep(_RAY_PAUSE)  # another process has what is left
            else:
                ended, _ = self.ray.wait(list(self.submitted), num_returns=1, timeout=_RAY_PAUSE)
                changed = [cell for reference in ended for cell in cells_of[self._store_result(reference).key]]
            if not self.submitted:
                changed = self.run.cells

    def _task(self) -> tuple[Any, tuple[Any, ...]]:
        """Return the remote function, and what all units pass to it."""
        usual = 1.0 if self.ray.cluster_resources().get("GPU", 0) else 0.0
        gpus = usual if self.options.gpus is None else self.options.gpus
        shared = self.ray.put(replace(self.run.context.absolute(), device="cuda" if gpus else "cpu"))
        memory = None if self.options.memory_gb is None else int(self.options.memory_gb * 10**9)
        needs = {"num_cpus": self.options.cpus, "num_gpus": gpus, "memory": memory}
        task = self.ray.remote(**needs, max_retries=self.options.retries, retry_exceptions=[OSError])(_run_unit)
        return task, (shared, shared.hex(), max(1, int(self.options.cpus)), __version__)

    def _submit(self, waiting: dict[str, Unit], task: Any, arguments: tuple[Any, ...]) -> None:
        """Keep a few more units submitted than can run at once, so that no node waits for this process."""
        room = _AHEAD + int(self.ray.cluster_resources().get("CPU", 1) / self.options.cpus)
        while waiting and len(self.submitted) < min(room, _MOST_SUBMITTED):
            unit = waiting.pop(next(iter(waiting)))
            claim = self.claims.enter_context(ExitStack())
            if claim.enter_context(self.run.claim(unit)):
                self.submitted[task.remote(unit, *arguments)] = (unit, claim)
            else:
                claim.close()

    def _store_result(self, reference: Any) -> Unit:
        unit, claim = self.submitted.pop(reference)
        with claim:
            try:
                outcome: Outcome | Failure = self.ray.get(reference)
            except self.ray.exceptions.RayError as error:
                cause = getattr(error, "cause", None) or error
                if isinstance(cause, DplError):
                    raise cause from error  # a node that cannot work at all would fail all units
                first = next(filter(None, str(cause).strip().splitlines()), "no reason given")
                reason = f"{type(cause).__name__} after {self.options.retries + 1} attempts: {first}"
                outcome = (reason, str(error))
            self.run.keep(unit, outcome)
        return unit


_kept: dict[str, BenchContext] = {}  # of the run that this process works for: the data set and model of its last unit


def _run_unit(unit: Unit, context: BenchContext, run: str, threads: int, version: str) -> Outcome | Failure:
    if run not in _kept:
        if version != __version__:
            raise DplError(
                f"node {platform.node()} has dpl {__version__}, the command has {version}; install the same version on "
                "all nodes"
            )
        if not context.data.is_dir():
            raise DplError(f"node {platform.node()} does not see {context.data}; put data on a shared file system")
        prepare_process(threads)
        _kept.clear()
        _kept[run] = context
    return try_unit(unit, _kept[run], lambda progress: None)


class _Job(NamedTuple):
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


def run_on_slurm(run: GridRun, options: ClusterOptions) -> dict[str, str]:
    """Do as `run_cells` with jobs of a Slurm cluster; return the errors by the unit's key."""
    root = run.store.root.absolute()
    context = replace(run.context.absolute(), device="cuda" if options.gpus else run.context.device)
    job = _Job(GridRun(list(run.cells), Store(root), context, begun=run.begun), math.ceil(options.cpus))
    left = {unit.key: unit for cell in run.cells for unit in cell.units() if not run.store.done(unit)}
    for _ in range(options.retries + 1):
        if count := min(options.jobs, len(run.pending())):
            executor = _executor(str(root / "jobs"), options)
            with executor.batch():
                submitted = [executor.submit(job) for _ in range(count)]
            try:
                while not all(one.done() for one in submitted):
                    left = {key: unit for key, unit in left.items() if not run.tell(unit)}
                    time.sleep(_SLURM_PAUSE)
            finally:  # cancelled where this process is interrupted
                for one in submitted:
                    if not one.done():
                        with suppress(RuntimeError, OSError):
                            one.cancel(check=False)
            left = {key: unit for key, unit in left.items() if not run.tell(unit)}
    if run.pending():
        raise DplError(f"jobs ended before their work; {root / 'jobs'} has their logs. Run again to resume")
    return run.failures()


def _executor(folder: str, options: ClusterOptions) -> Any:
    try:
        executor = optional("submitit", "slurm").AutoExecutor(folder=folder, cluster=options.executor)
    except RuntimeError as error:
        raise DplError(f"engine slurm: {error}; is this a machine from which jobs are submitted?") from error
    memory = {} if options.memory_gb is None else {"mem_gb": options.memory_gb}
    executor.update_parameters(
        name="dpl-bench", timeout_min=max(1, round(60 * options.hours)), cpus_per_task=math.ceil(options.cpus),
        gpus_per_node=math.ceil(options.gpus or 0), tasks_per_node=1, nodes=1, **memory,
    )  # fmt: skip
    try:
        executor.update_parameters(**options.extra)
    except (NameError, TypeError, ValueError) as error:
        raise SettingError(f"engine slurm: {str(error).splitlines()[0]}") from error
    return executor
