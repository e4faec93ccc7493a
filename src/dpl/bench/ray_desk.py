"""The side of the Ray engine that works: what a process keeps between its units, and the hub it asks and reports to."""

import os
import platform
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import gettempdir
from typing import Any

import torch

from dpl import __version__
from dpl.bench.context import BenchContext
from dpl.bench.engine import UnitFailure, UnitProgress, try_unit
from dpl.bench.ray_placing import Parcel, place
from dpl.bench.run import Outcome
from dpl.bench.unit import Unit
from dpl.core.allocator import keep_freed_memory
from dpl.core.errors import DplError
from dpl.core.extras import optional
from dpl.core.files import file_sha256

__all__ = ["Hub", "Setup", "work"]

_REPORT_EVERY = 1.0  # seconds


class Hub:
    """An actor beside the driver: hands out its files, and takes in what tasks say meanwhile."""

    def __init__(self, parcels: list[Any]) -> None:
        """Take a reference to the parcels: they may be many names, and the hub may have to be started again."""
        (reference,) = parcels
        self._parcels: dict[str, Parcel] = optional("ray", "ray").get(reference)
        self._said: dict[str, UnitProgress] = {}

    def part(self, key: str, number: int) -> list[tuple[str, bytes]]:
        """Return a part of a parcel."""
        return self._parcels[key].read(number)

    def say(self, event: UnitProgress) -> None:
        """Take in how a unit stands; only the last word counts."""
        self._said[event.unit.key] = event

    def heard(self) -> list[UnitProgress]:
        """Return what was said since the last time."""
        said, self._said = self._said, {}
        return list(said.values())


@dataclass(frozen=True)
class Setup:
    """What all tasks of a run have in common."""

    context: BenchContext
    data: Parcel
    files: dict[str, Parcel]
    hub: Any
    threads: int
    device: str
    node_folder: str | None
    version: str


@dataclass
class _Desk:
    """One process of a node: its context stays from unit to unit, with the data set and the last model."""

    setup: Setup
    context: BenchContext = field(init=False)

    def __post_init__(self) -> None:
        self.node = optional("ray", "ray").get_runtime_context().get_node_id()
        torch.set_num_threads(self.setup.threads)
        keep_freed_memory()
        given = self.setup.context
        data = self._placed(self.setup.data)
        cache = given.cache if data == given.data else self.folder / "cache"
        self.context = replace(given, data=data, files={}, cache=cache, device=self.setup.device)

    @property
    def folder(self) -> Path:
        """Where this node keeps copies."""
        if self.setup.node_folder is None:
            return Path(gettempdir()) / f"dpl-{os.getuid()}"
        return Path(self.setup.node_folder.replace("{node}", self.node))

    def ready(self, unit: Unit) -> BenchContext:
        """Return the context, with the files that a unit needs."""
        wanted = {unit.weights, *unit.files.values()} - set(self.context.files)
        found = {digest: self._file(digest, self.setup.files[digest]) for digest in wanted}
        self.context.files = {**self.context.files, **found}
        return self.context

    def say(self, event: UnitProgress) -> None:
        """Tell how a unit stands, now and then."""
        if time.monotonic() >= self._next_word:
            self._next_word = time.monotonic() + _REPORT_EVERY
            self.setup.hub.say.remote(replace(event, place=f"{self.node[:8]}:{os.getpid()}"))

    _next_word = 0.0

    def _file(self, digest: str, parcel: Parcel) -> Path:
        path = self._placed(parcel) / parcel.files[0][0]
        if file_sha256(path) != digest:
            raise OSError(f"{path} has changed since this run began; run again")
        return path

    def _placed(self, parcel: Parcel) -> Path:
        if self.setup.node_folder is None and parcel.lies_at(parcel.root):
            return parcel.root
        # the future and not ray.get: a task that waits there gives its core to another task
        return place(
            parcel, self.folder, lambda number: self.setup.hub.part.remote(parcel.key, number).future().result()
        )


_desks: dict[str, _Desk] = {}


def work(unit: Unit, setups: list[Any]) -> Outcome | UnitFailure:
    """Run one unit in a process of the cluster."""
    (reference,) = setups
    run = reference.hex()
    if run not in _desks:
        _desks.clear()  # of an earlier run
        setup: Setup = reference.future().result()
        if setup.version != __version__:
            raise DplError(
                f"node {platform.node()} has dpl {__version__}, the command has {setup.version}; install the "
                "same version on all nodes"
            )
        _desks[run] = _Desk(setup)
    desk = _desks[run]
    return try_unit(unit, desk.ready(unit), desk.say)
