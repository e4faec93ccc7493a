"""Kill writers of snapshots and look at what is left."""

import multiprocessing
import os
import random
import signal
import sys
import time
from functools import cache
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import dpl
from abuse import writer
from abuse.streams import network
from dpl.snapshot import SnapshotStore

_context = multiprocessing.get_context("forkserver")


@cache
def _prepare() -> None:
    """Start the server that victims are forked from: it imports torch once, not for every victim."""
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)  # the server does not see this process's own path
    _context.set_forkserver_preload(["abuse.warm"])
    forkserver.ensure_running()
    os.environ.pop("PYTHONPATH")
    if before is not None:
        os.environ["PYTHONPATH"] = before


def start(target: Any, folder: Path, *args: Any) -> tuple[Any, Connection]:
    _prepare()
    here, there = _context.Pipe(duplex=False)
    process = _context.Process(target=target, args=(str(folder), there, *args), daemon=True)
    process.start()
    there.close()
    return process, here


def drain(told: Connection) -> list[Any]:
    """Everything that the victim told before it died."""
    heard = []
    while True:
        try:
            heard.append(told.recv())
        except EOFError:
            return heard


def kill_at_random(folder: Path, rng: random.Random) -> int:
    """Start a writer, kill it after a while, check the store; return the number of the last snapshot it told."""
    process, told = start(writer.write_forever, folder)
    told.poll(30)  # it is writing now
    time.sleep(rng.uniform(0, 0.06))
    os.kill(process.pid, signal.SIGKILL)
    numbers = drain(told)
    process.join()
    return check(folder, max(numbers, default=0))


def kill_at_moment(folder: Path, moment: int) -> int | None:
    """Let a writer die at the given moment of its fourth snapshot; return None when there is no such moment."""
    process, told = start(writer.write_and_die, folder, moment)
    heard = drain(told)
    process.join()
    if isinstance(heard[-1], tuple):
        return None
    assert process.exitcode == -signal.SIGKILL
    return check(folder, max(heard))


def check(folder: Path, acknowledged: int) -> int:
    """After a restart the newest snapshot is good and not older than the last acknowledged; nothing is left over."""
    store = SnapshotStore(folder)
    newest = store.newest()
    number = 0 if newest is None else int(newest.name)
    assert number >= acknowledged, f"snapshot {number} is older than the acknowledged {acknowledged}"
    if newest is not None:
        dpl.load(store, network())
    left = [path.name for path in folder.iterdir() if not path.name.isdecimal() and path.name != ".lock"]
    assert not left, f"left over: {left}"
    return acknowledged
