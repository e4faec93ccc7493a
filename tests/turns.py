"""Tests that start Ray take turns: two clusters that start at once on two cores miss Ray's own time limits."""

import fcntl
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def my_turn(what: str) -> Iterator[None]:
    """Wait until no other test process on this machine is inside such a block."""
    with (Path(tempfile.gettempdir()) / f"dpl-tests-{what}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
