"""A grid on a Ray cluster: each unit is a task with declared resources, run again where a process or a node dies.

Tasks return what they found; this process alone holds the claims and writes the store, so nodes need not see its folder
and a unit is committed once, however often it was begun. If this process ends, its tasks end with it, and the next run
goes on from the store.
"""

import math
import os
import socket
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

from dpl import __version__
from dpl.bench.context import BenchContext
from dpl.bench.engine import OnProgress, UnitFailure, UnitProgress, failures, pending_units, record_result
from dpl.bench.ray_desk import Hub, Setup, work
from dpl.bench.ray_placing import absolute, data_parcel, file_parcel
from dpl.bench.selection import Cell
from dpl.bench.store import Store
from dpl.bench.unit import Unit
from dpl.core.errors import DplError, SettingError
from dpl.core.extras import optional

__all__ = ["RayOptions", "run_on_ray"]

_PAUSE = 0.25  # seconds between looks at what the tasks say
_ANSWER = 10.0  # seconds in which a cluster's head must answer
_AHEAD = 8  # units that are handed out beyond what the cluster can run at once
_MOST_OUT = 512  # each unit that is out holds one open file, its claim


@dataclass(frozen=True)
class RayOptions:
    """What a unit needs, and where Ray is."""

    address: str | None = None
    """Of a running cluster ("auto": the one of this machine); None: Ray is started here, and stopped at the end."""
    cpus: float = 1
    gpus: float | None = None
    """GPUs, or the share of one; None: one where the cluster has any."""
    memory: int | None = None
    """Bytes; a node runs no more units than fit. None: not counted."""
    retries: int = 3
    """How often a unit is begun again when its process or node died, or when reading its files failed."""
    node_folder: str | None = None
    """Folder on each node for copies of data and weights, `{node}` standing for the node's id; None: none are made
    where a node sees the same files, else they go into the node's folder for temporary files."""

    def __post_init__(self) -> None:
        if self.address is not None and self.address.startswith("ray://"):
            raise SettingError(
                f"address={self.address!r}: Ray's client has no node of its own to read data from; run this command on "
                "a node of the cluster, with --address auto"
            )
        if not self.cpus > 0 or self.retries < 0 or (self.gpus or 0) < 0:
            raise SettingError(
                f"cpus={self.cpus}, gpus={self.gpus}, retries={self.retries}: expected cpus above 0, others from 0"
            )


def run_on_ray(
    cells: Sequence[Cell], store: Store, context: BenchContext, on_progress: OnProgress = lambda event: None,
    options: RayOptions | None = None,
) -> dict[str, str]:  # fmt: skip
    """Do as `run_cells` on a Ray cluster; return the errors by the unit's key."""
    asked = options or RayOptions()
    ray = optional("ray", "ray")
    begun = time.time()
    with ExitStack() as claims, _connected(ray, asked) as own:
        driver = _Driver(ray, cells, store, asked, on_progress, begun, claims)
        try:
            driver.start(context)
            driver.run()
        finally:
            if not own:  # tasks end with their connection, but this one goes on
                driver.cancel()
    return failures(cells, store, begun)


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
    """Say at once if nobody listens at HOST:PORT; Ray itself would try for minutes."""
    host, colon, port = (address or "").rpartition(":")
    if colon and port.isdecimal():
        try:
            socket.create_connection((host, int(port)), timeout=_ANSWER).close()
        except OSError as error:
            raise DplError(f"address={address!r}: no Ray cluster can be joined there ({error})") from error


@dataclass
class _Driver:
    """Hands out units, listens, and stores what comes back."""

    ray: Any
    cells: Sequence[Cell]
    store: Store
    options: RayOptions
    on_progress: OnProgress
    begun: float
    claims: ExitStack
    out: dict[Any, tuple[Unit, ExitStack]] = field(default_factory=dict)
    todo: deque[Unit] = field(default_factory=deque)
    queued: set[str] = field(default_factory=set)

    def start(self, context: BenchContext) -> None:
        """Make what all tasks need known to the cluster."""
        context = absolute(context)
        units = list({unit.key: unit for cell in self.cells for unit in cell.units()}.values())
        self.of: dict[str, list[Cell]] = {}
        for cell in self.cells:
            for unit in cell.units():
                self.of.setdefault(unit.key, []).append(cell)
        gpus = self._gpus()
        data = data_parcel(units, context)
        files = {digest: file_parcel(path) for digest, path in context.files.items()}
        here = self.ray.get_runtime_context().get_node_id()
        pinned = self.ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(here, soft=False)
        self.parcels = [self.ray.put({parcel.key: parcel for parcel in (data, *files.values())})]
        self.hub = (
            self.ray.remote(Hub)
            .options(num_cpus=0, max_restarts=-1, max_task_retries=5, max_concurrency=8, scheduling_strategy=pinned)
            .remote(self.parcels)
        )
        setup = Setup(
            context=context, data=data, files=files, hub=self.hub, threads=max(1, int(self.options.cpus)),
            device="cuda" if gpus else "cpu", node_folder=self.options.node_folder, version=__version__,
        )  # fmt: skip
        self.setup = [self.ray.put(setup)]  # inside a list: a task opens it once for its whole process
        needs = {"num_cpus": self.options.cpus, "num_gpus": gpus, "memory": self.options.memory}
        again = {"max_retries": self.options.retries, "retry_exceptions": [OSError]}
        self.task = self.ray.remote(**needs, **again)(work)

    def _gpus(self) -> float:
        if self.options.gpus is not None:
            return self.options.gpus
        return 1.0 if self.ray.cluster_resources().get("GPU", 0) else 0.0

    def run(self) -> None:
        """Run all units that are ready, then those that become ready by them, until nothing is left."""
        self._queue(self.cells)
        while self.out or self.todo:
            self._hand_out()
            if self.out:
                self._wait()
            else:
                time.sleep(_PAUSE)  # another process has what is left
            if not self.out:
                self._queue(self.cells)

    def _wait(self) -> None:
        landed, _ = self.ray.wait(list(self.out), num_returns=1, timeout=_PAUSE)
        self._listen()
        for reference in landed:
            self._land(reference)

    def cancel(self) -> None:
        """End the tasks that are out."""
        for reference in self.out:
            self.ray.cancel(reference)

    def _queue(self, cells: Sequence[Cell]) -> None:
        for cell in cells:
            for unit in pending_units(cell, self.store, self.begun):
                if unit.key not in self.queued:
                    self.queued.add(unit.key)
                    self.todo.append(unit)

    def _hand_out(self) -> None:
        """Keep a few more units out than can run at once, so that no node waits for this process."""
        while self.todo and len(self.out) < self._room():
            unit = self.todo.popleft()
            claim = self.claims.enter_context(ExitStack())
            mine = claim.enter_context(self.store.claim(unit))
            if mine and not self.store.done(unit) and self.store.failure(unit, self.begun) is None:
                self.out[self.task.remote(unit, self.setup)] = (unit, claim)
            else:
                claim.close()
                self.queued.discard(unit.key)

    def _room(self) -> int:
        return min(_MOST_OUT, _AHEAD + int(self.ray.cluster_resources().get("CPU", 1) / self.options.cpus))

    def _listen(self) -> None:
        flying = {unit.key for unit, _ in self.out.values()}
        try:
            events: list[UnitProgress] = self.ray.get(self.hub.heard.remote(), timeout=10)
        except self.ray.exceptions.RayError:  # it is being started again: progress shows a little later
            return
        for event in events:
            if event.unit.key in flying:
                self.on_progress(event)

    def _land(self, reference: Any) -> None:
        """Store what a task returned, or why it did not."""
        unit, claim = self.out.pop(reference)
        with claim:
            try:
                outcome = self.ray.get(reference)
            except self.ray.exceptions.RayError as error:
                if isinstance(cause := getattr(error, "cause", None), DplError):
                    raise cause from error  # a node that cannot work at all would fail all units
                outcome = UnitFailure(_reason(error, self.options.retries), str(error))
            self.on_progress(record_result(unit, self.store, outcome))
        self._queue(self.of[unit.key])


def _reason(error: Exception, retries: int) -> str:
    """Return one line for an error that no further attempt could mend."""
    cause = getattr(error, "cause", None)
    lines = [line for line in str(cause or error).strip().splitlines() if line]
    return f"{type(cause or error).__name__} after {retries + 1} attempts: {lines[0] if lines else 'no reason given'}"
