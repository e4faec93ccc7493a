"""The one thread that writes to the state folder.

After a failed write the server continues, reports the problem, and retries until the write succeeds.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass, field

from dpl.serve.store import StreamSnapshot, StreamStore
from dpl.serve.stream import Stream

__all__ = ["Writer"]

_RETRY_SECONDS = 2.0
_log = logging.getLogger("dpl.serve")


@dataclass
class _Task:
    stream: Stream
    snapshot: StreamSnapshot | None  # None: delete the stream
    automatic: bool
    done: "Future[None]" = field(default_factory=Future)


class Writer:
    """Writes snapshots in the order of the calls; of several automatic ones that wait, only the newest."""

    def __init__(self, store: StreamStore, on_written: Callable[[bool, float], None]) -> None:
        self._store = store
        self._on_written = on_written
        self._tasks: deque[_Task] = deque()
        self._failed: dict[str, _Task] = {}
        self._changed = threading.Condition()
        self._working: _Task | None = None
        self._stopping = False
        self.problem: str | None = store.problem
        self._thread = threading.Thread(target=self._work, name="dpl-serve-writer", daemon=True)
        self._thread.start()

    def save_soon(self, stream: Stream, snapshot: StreamSnapshot) -> None:
        """Write a snapshot in the background; an older one of the stream that still waits is dropped."""
        with self._changed:
            for task in self._tasks:
                if task.automatic and task.stream is stream:
                    task.snapshot = snapshot
                    return
            self._tasks.append(_Task(stream, snapshot, automatic=True))
            self._changed.notify()

    def save_now(self, stream: Stream, snapshot: StreamSnapshot) -> None:
        """Write a snapshot and return when it is on the disk; raises OSError if it cannot be written."""
        self._wait(_Task(stream, snapshot, automatic=False))

    def delete(self, stream: Stream) -> None:
        """Delete a stream's folder, and drop the snapshots of it that still wait."""
        with self._changed:
            self._failed.pop(stream.id, None)
            self._tasks = deque(task for task in self._tasks if not (task.automatic and task.stream is stream))
        self._wait(_Task(stream, None, automatic=False))

    def flush(self) -> None:
        """Return when every snapshot that waits was written, or could not be."""
        with self._changed:
            waiting = [*self._tasks] if self._working is None else [self._working, *self._tasks]
        wait([task.done for task in waiting])

    def stop(self) -> None:
        """Write the snapshots that wait, then end the thread."""
        with self._changed:
            self._stopping = True
            self._changed.notify()
        self._thread.join()

    def _wait(self, task: _Task) -> None:
        with self._changed:
            if self._stopping:
                raise OSError("the server is stopping")
            self._tasks.append(task)
            self._changed.notify()
        task.done.result()

    def _work(self) -> None:
        while (task := self._next()) is not None:
            start = time.monotonic()
            try:
                self._do(task)
            except OSError as error:
                self._note_failure(task, error)
            except Exception as error:  # an unexpected error must not stop the writing of other streams
                _log.exception("writing stream %s", task.stream.id)
                self._note_failure(task, OSError(f"{type(error).__name__}: {error}"))
            else:
                self._note_success(task, time.monotonic() - start)

    def _next(self) -> _Task | None:
        """Return the next task, or a failed one to retry if no other comes for a while; None at the end."""
        with self._changed:
            while not self._tasks:
                if self._stopping:
                    return None
                if not self._changed.wait(_RETRY_SECONDS if self._failed else None) and self._failed:
                    return self._failed.pop(next(iter(self._failed)))
            self._working = self._tasks.popleft()
            return self._working

    def _do(self, task: _Task) -> None:
        if task.snapshot is None:
            self._store.delete(task.stream.id)
        else:
            self._store.write(task.stream.id, task.snapshot)

    def _note_success(self, task: _Task, seconds: float) -> None:
        if self.problem is not None:
            _log.warning("the state folder can be written again")
        self.problem = None
        if task.snapshot is not None:
            task.stream.note_snapshot(task.snapshot)
        self._forget_older_failure(task)
        self._on_written(True, seconds)
        task.done.set_result(None)

    def _note_failure(self, task: _Task, error: OSError) -> None:
        reason = f"{error.strerror or error}"
        if self.problem is None:
            _log.error("the state folder cannot be written: %s", reason)
            task.stream.event("snapshot_failed", reason=reason)
        self.problem = f"{self._store.folder}: {reason}"
        self._on_written(False, 0.0)
        if task.snapshot is not None:
            with self._changed:
                known = self._failed.get(task.stream.id)
                if known is None or known.snapshot is None or known.snapshot.name < task.snapshot.name:
                    self._failed[task.stream.id] = _Task(task.stream, task.snapshot, automatic=True)
        with suppress(Exception):  # nobody waits for a retry
            task.done.set_exception(error)

    def _forget_older_failure(self, task: _Task) -> None:
        """Drop the retry of a snapshot if a newer one was written or the stream was deleted."""
        with self._changed:
            failed = self._failed.get(task.stream.id)
            if failed and failed.snapshot and (task.snapshot is None or failed.snapshot.name <= task.snapshot.name):
                del self._failed[task.stream.id]
