"""A process that writes snapshots until it is killed, from outside or at a chosen moment of its own."""

import os
import signal
from collections.abc import Callable
from functools import cache
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

import dpl
from abuse.streams import iid
from abuse.subjects import adapted
from dpl.snapshot import SnapshotStore


def write_forever(folder: str, told: Connection) -> None:
    """Adapt and save; tell each number once `save` has returned."""
    torch.set_num_threads(1)
    store, model, batch = _prepared(folder)
    while True:
        model(batch)
        told.send(int(store.save(model).name))


def write_and_die(folder: str, told: Connection, moment: int) -> None:
    """Save three times; in the fourth die at the given moment: before or after a flush or a rename."""
    torch.set_num_threads(1)
    store, model, batch = _prepared(folder)
    for _ in range(3):
        model(batch)
        told.send(int(store.save(model).name))
    moments = _die_at(moment)
    model(batch)
    number = int(store.save(model).name)
    told.send(number)
    told.send(("survived", moments[0]))


@cache
def model_and_batch() -> tuple[dpl.AdaptiveModel, torch.Tensor]:
    """Made once where the victims are forked from (abuse.warm), so that each starts to write at once."""
    return adapted("tent"), iid("noise", 8, 8)[0][0]


def _prepared(folder: str) -> tuple[SnapshotStore, dpl.AdaptiveModel, torch.Tensor]:
    return SnapshotStore(folder, keep=2), *model_and_batch()


def _die_at(moment: int) -> list[int]:
    """Count the moments before and after every flush and rename; kill this process at the given one."""
    passed = [0]

    def tick() -> None:
        passed[0] += 1
        if passed[0] == moment:
            os.kill(os.getpid(), signal.SIGKILL)

    def watched(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            tick()
            result = function(*args, **kwargs)
            tick()
            return result

        return call

    os.fsync = watched(os.fsync)
    Path.rename = watched(Path.rename)  # type: ignore[method-assign]
    return passed
