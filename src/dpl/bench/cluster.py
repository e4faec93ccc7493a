"""A grid on a cluster: tasks of Ray or jobs of Slurm, each of which runs what no other has claimed.

All nodes share a file system with the data and the results, and its locks.
"""

import math
import os
import platform
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from dpl import __version__
from dpl.bench.engine import GridRun, IsOver, prepare_process
from dpl.core.errors import DplError, SettingError
from dpl.core.extras import optional
from dpl.core.settings import Checked, setting

__all__ = ["ClusterOptions", "run_on_ray", "run_on_slurm"]

_TIMEOUT = 10.0  # seconds in which a cluster's head must accept a connection


@dataclass(frozen=True, kw_only=True)
class ClusterOptions(Checked):
    """What a run asks of a Ray or Slurm cluster, and where that is."""

    cpus_per_unit: float = setting(1.0, "cores of a run", low=0.01)
    gpus_per_unit: float | None = setting(None, "GPUs of a run, or a part (default: 1 if Ray has any, else 0)", low=0)
    memory_per_unit: float | None = setting(None, "GB of memory of a run (default: not counted)", low=0)
    retries: int = setting(3, "how often a run whose process or node died is retried", low=0)
    address: str | None = setting(None, "of a running Ray cluster: auto or HOST:PORT (default: a new one)")
    jobs: int = setting(1, "jobs that run at once; on Ray at least as many as it has room for", low=1)
    hours: float = setting(24.0, "time limit of a job; one that reaches it is queued again", low=0)
    executor: str = setting("slurm", "local: processes of this machine", choices=("slurm", "local", "debug"))
    extra: dict[str, Any] = field(default_factory=dict)  # of submitit, such as `slurm_partition`


class _Job(NamedTuple):
    """What a node does; submitit asks for its checkpoint when the time limit is reached."""

    run: GridRun
    threads: int
    version: str = __version__

    def __call__(self) -> None:
        """Run what no other job has claimed."""
        node = platform.node()
        if self.version != __version__:
            raise DplError(
                f"node {node} has dpl {__version__}, the command has {self.version}; install the same version on all "
                "nodes"
            )
        for folder in (self.run.context.data, self.run.store.root):
            if not folder.is_dir():
                raise DplError(f"node {node} does not see {folder}; put data and results on a shared file system")
        prepare_process(self.threads, self.run.context.modules)
        self.run.run()

    def checkpoint(self) -> Any:
        """Return the same job: finished units are in the store."""
        return optional("submitit", "slurm").helpers.DelayedSubmission(self)


def run_on_ray(run: GridRun, options: ClusterOptions) -> dict[str, str]:
    """Do as `GridRun.run` with tasks of a Ray cluster; return the errors by the unit's key."""
    ray, cpus = optional("ray", "ray"), options.cpus_per_unit
    with _connected(ray, options):
        resources = ray.cluster_resources()
        gpus = options.gpus_per_unit if options.gpus_per_unit is not None else float("GPU" in resources)
        memory = None if options.memory_per_unit is None else int(options.memory_per_unit * 10**9)
        task = ray.remote(
            num_cpus=cpus, num_gpus=gpus, memory=memory, max_retries=options.retries, retry_exceptions=[OSError]
        )(_run_job)
        run.context.device = "cuda" if gpus else "cpu"

        @contextmanager
        def start(run: GridRun, count: int) -> Iterator[IsOver]:
            job = ray.put(_Job(run, max(1, int(cpus))))
            tasks = [task.remote(job) for _ in range(count)]
            try:
                yield lambda: _have_ended(ray, tasks)
            finally:
                for one in tasks:
                    ray.cancel(one)

        return run.run_by_jobs(start, max(options.jobs, int(resources.get("CPU", 1) / cpus)))


def _run_job(job: _Job) -> None:
    job()


def _have_ended(ray: Any, tasks: list[Any]) -> bool:
    """Say whether all tasks have ended; one that cannot work at all is an error, for one that died others work."""
    ended, running = ray.wait(tasks, num_returns=len(tasks), timeout=0)
    for task in ended:
        try:
            ray.get(task)
        except ray.exceptions.RayTaskError as error:
            raise error.cause from error
        except ray.exceptions.RayError:
            pass
    return not running


@contextmanager
def _connected(ray: Any, options: ClusterOptions) -> Iterator[None]:
    """Use the cluster that this process is in, join the one at the address, or start one here."""
    if ray.is_initialized():
        yield
        return
    local = {"num_cpus": max(os.cpu_count() or 1, math.ceil(options.cpus_per_unit)), "include_dashboard": False}
    address = options.address or os.environ.get("RAY_ADDRESS")
    host, colon, port = (address or "").rpartition(":")
    try:
        if colon and port.isdecimal():  # Ray itself would try for minutes
            socket.create_connection((host, int(port)), timeout=_TIMEOUT).close()
        ray.init(address or "local", logging_level="ERROR", log_to_driver=False, **({} if address else local))
    except (OSError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
        reason = str(error).strip().splitlines()[0]
        raise DplError(
            f"address={address!r}: no Ray cluster can be joined there ({reason}); expected the HOST:PORT of a cluster "
            "with this machine as a node, or auto. Ray's client, ray://, is none"
        ) from error
    try:
        yield
    finally:
        ray.shutdown()


def run_on_slurm(run: GridRun, options: ClusterOptions) -> dict[str, str]:
    """Do as `GridRun.run` with jobs of a Slurm cluster; return the errors by the unit's key."""
    if options.gpus_per_unit:
        run.context.device = "cuda"

    @contextmanager
    def start(run: GridRun, count: int) -> Iterator[IsOver]:
        executor = _executor(str(run.store.root / "jobs"), options)
        with executor.batch():
            jobs = [executor.submit(_Job(run, math.ceil(options.cpus_per_unit))) for _ in range(count)]
        try:
            yield lambda: all(job.done() for job in jobs)
        finally:  # cancelled where this process is interrupted
            for job in jobs:
                if not job.done():
                    with suppress(RuntimeError, OSError):
                        job.cancel(check=False)

    return run.run_by_jobs(start, options.jobs, options.retries)


def _executor(folder: str, options: ClusterOptions) -> Any:
    try:
        executor = optional("submitit", "slurm").AutoExecutor(folder=folder, cluster=options.executor)
    except RuntimeError as error:
        raise DplError(f"engine slurm: {error}; is this a machine from which jobs are submitted?") from error
    memory = {} if options.memory_per_unit is None else {"mem_gb": options.memory_per_unit}
    executor.update_parameters(
        name="dpl-bench", timeout_min=max(1, round(60 * options.hours)), cpus_per_task=math.ceil(options.cpus_per_unit),
        gpus_per_node=math.ceil(options.gpus_per_unit or 0), tasks_per_node=1, nodes=1, **memory,
    )  # fmt: skip
    try:
        executor.update_parameters(**options.extra)
    except (NameError, TypeError, ValueError) as error:
        raise SettingError(f"engine slurm: {str(error).splitlines()[0]}") from error
    return executor
