"""A grid on a Ray cluster whose nodes share a file system: each unit is a task with declared resources.

Tasks return what they found; this process alone holds the claims and writes the store, so a unit is committed once,
however often it was started. If this process ends, its tasks end with it, and the next run resumes from the store.
"""

import math
import os
import platform
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from dpl import __version__
from dpl.bench.context import BenchContext
from dpl.bench.engine import ClusterOptions, GridRun, OnProgress, UnitFailure, prepare_process, try_unit
from dpl.bench.run import Outcome
from dpl.bench.selection import Cell
from dpl.bench.store import Store
from dpl.bench.unit import Unit
from dpl.core.errors import DplError, SettingError
from dpl.core.extras import optional
from dpl.core.settings import setting

__all__ = ["RayOptions", "last_words", "run_on_ray"]

_PAUSE = 0.25  # seconds between two checks of the tasks
_TIMEOUT = 10.0  # seconds in which a cluster's head must accept a connection
_AHEAD = 8  # units that are submitted beyond what the cluster can run at once
_MOST_SUBMITTED = 512  # each submitted unit holds one open file, its claim
_LOST = "the node of this command left the Ray cluster; finished runs are kept. Run the same command again to go on"


@dataclass(frozen=True, kw_only=True)
class RayOptions(ClusterOptions):
    """What a run asks of a Ray cluster, and where that is; without `gpus`, one if the cluster has any."""

    address: str | None = setting(None, "of a running cluster, or auto; None: a new one for this run")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.address is not None and self.address.startswith("ray://"):
            raise SettingError(
                f"address={self.address!r}: Ray's client has no node that sees the data; run this command on a node of "
                "the cluster, with --address auto"
            )


def run_on_ray(
    cells: Sequence[Cell], store: Store, context: BenchContext, on_progress: OnProgress = lambda progress: None,
    options: RayOptions | None = None,
) -> dict[str, str]:  # fmt: skip
    """Do as `run_cells` on a Ray cluster; return the errors by the unit's key."""
    options = options or RayOptions()
    ray = optional("ray", "ray")
    run = GridRun(cells, store, context, on_progress)
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
def _connected(ray: Any, options: RayOptions) -> Iterator[bool]:
    """Use the cluster that this process is in, join the one at the address, or start one here.

    Yields whether the connection is ours, to be ended with the block.
    """
    if ray.is_initialized():
        yield False
        return
    local = {"num_cpus": max(os.cpu_count() or 1, math.ceil(options.cpus)), "include_dashboard": False}
    address = options.address or os.environ.get("RAY_ADDRESS")
    _check_reachable(address)
    try:
        ray.init(address or "local", logging_level="ERROR", log_to_driver=False, **({} if address else local))
    except (ConnectionError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
        reason = str(error).strip().splitlines()[0]
        raise DplError(f"address={address!r}: no Ray cluster can be joined there ({reason})") from error
    try:
        yield True
    finally:
        ray.shutdown()


def _check_reachable(address: str | None) -> None:
    """Raise at once if nobody listens at HOST:PORT; Ray itself would try for minutes."""
    host, colon, port = (address or "").rpartition(":")
    if colon and port.isdecimal():
        try:
            socket.create_connection((host, int(port)), timeout=_TIMEOUT).close()
        except OSError as error:
            raise DplError(f"address={address!r}: no Ray cluster can be joined there ({error})") from error


@dataclass
class _Driver:
    """Submits units, waits for them, and stores what comes back."""

    ray: Any
    run: GridRun
    options: RayOptions
    claims: ExitStack
    submitted: dict[Any, tuple[Unit, ExitStack]] = field(default_factory=dict)
    waiting: dict[str, Unit] = field(default_factory=dict)

    def run_all(self) -> None:
        """Run all units that may run, then those that may run after them, until nothing is left."""
        task, arguments = self._task()
        cells_of: dict[str, list[Cell]] = {}
        for cell in self.run.cells:
            for unit in cell.units():
                cells_of.setdefault(unit.key, []).append(cell)
        self._enqueue(self.run.cells)
        while self.submitted or self.waiting:
            self._submit(task, arguments)
            if self.submitted:
                ended, _ = self.ray.wait(list(self.submitted), num_returns=1, timeout=_PAUSE)
                for reference in ended:
                    self._enqueue(cells_of[self._store_result(reference).key])
            else:
                time.sleep(_PAUSE)  # another process has what is left
            if not self.submitted:
                self._enqueue(self.run.cells)

    def _task(self) -> tuple[Any, tuple[Any, ...]]:
        """Return the remote function, and what all units pass to it."""
        gpus = self.options.gpus
        if gpus is None:
            gpus = 1.0 if self.ray.cluster_resources().get("GPU", 0) else 0.0
        shared = self.ray.put(replace(self.run.context.absolute(), device="cuda" if gpus else "cpu"))
        memory = None if self.options.memory_gb is None else int(self.options.memory_gb * 10**9)
        needs = {"num_cpus": self.options.cpus, "num_gpus": gpus, "memory": memory}
        task = self.ray.remote(**needs, max_retries=self.options.retries, retry_exceptions=[OSError])(_run_unit)
        return task, (shared, shared.hex(), max(1, int(self.options.cpus)), __version__)

    def _enqueue(self, cells: Sequence[Cell]) -> None:
        submitted = {unit.key for unit, _ in self.submitted.values()}
        self.waiting |= {unit.key: unit for unit in self.run.pending(cells) if unit.key not in submitted}

    def _submit(self, task: Any, arguments: tuple[Any, ...]) -> None:
        """Keep a few more units submitted than can run at once, so that no node waits for this process."""
        room = _AHEAD + int(self.ray.cluster_resources().get("CPU", 1) / self.options.cpus)
        while self.waiting and len(self.submitted) < min(room, _MOST_SUBMITTED):
            unit = self.waiting.pop(next(iter(self.waiting)))
            claim = self.claims.enter_context(ExitStack())
            if claim.enter_context(self.run.claim(unit)):
                self.submitted[task.remote(unit, *arguments)] = (unit, claim)
            else:
                claim.close()

    def _store_result(self, reference: Any) -> Unit:
        """Store what a task returned, or why it did not."""
        unit, claim = self.submitted.pop(reference)
        with claim:
            try:
                outcome = self.ray.get(reference)
            except self.ray.exceptions.RayError as error:
                if isinstance(cause := getattr(error, "cause", None), DplError):
                    raise cause from error  # a node that cannot work at all would fail all units
                outcome = UnitFailure(_reason(error, self.options.retries), str(error))
            self.run.keep(unit, outcome)
        return unit


def _reason(error: Exception, retries: int) -> str:
    """Return one line for an error that remained after the last attempt."""
    cause = getattr(error, "cause", None)
    lines = [line for line in str(cause or error).strip().splitlines() if line]
    return f"{type(cause or error).__name__} after {retries + 1} attempts: {lines[0] if lines else 'no reason given'}"


_kept: dict[str, BenchContext] = {}  # of the run that this process works for: the data set and model of its last unit


def _run_unit(unit: Unit, context: BenchContext, run: str, threads: int, version: str) -> Outcome | UnitFailure:
    """Run one unit in a process of the cluster."""
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
