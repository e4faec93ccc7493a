"""The one thread that writes to the state folder. No other thread waits for it.

After a failed write the server continues, reports the problem, and retries until the write succeeds.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
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
    done: "Future[None]" = field(default_factory=Future)

    @property
    def kind(self) -> str:
        return "delete" if self.snapshot is None else self.snapshot.name.kind


class Writer:
    """Writes snapshots in the order of the calls; of several automatic ones that wait, only the newest."""

    def __init__(self, store: StreamStore, on_written: Callable[[bool, float], None], slow: float) -> None:
        self._store, self._on_written, self._slow = store, on_written, slow
        self._tasks: deque[_Task] = deque()
        self._failed: dict[str, _Task] = {}  # by stream: the last one, unless a later one succeeded
        self._changed = threading.Condition()
        self._working: _Task | None = None
        self._began = 0.0
        self._stopping = False
        self._failure: str | None = store.problem
        self._thread = threading.Thread(target=self._work, name="dpl-serve-writer", daemon=True)
        self._thread.start()

    @property
    def problem(self) -> str | None:
        """Why the folder cannot be written at present, or that it is slow."""
        seconds = time.monotonic() - self._began
        if self._failure is None and self._working is not None and seconds > self._slow:
            return f"the disk is slow: a write has taken {seconds:.0f} s"
        return self._failure

    def save(self, stream: Stream, snapshot: StreamSnapshot) -> "Future[None]":
        """Write a snapshot in the background; the result is there when it is on the disk, or an OSError."""
        with self._changed:
            kind = snapshot.name.kind
            same = next((task for task in self._tasks if task.stream is stream and task.kind == kind), None)
            if same is None:
                return self._put(_Task(stream, snapshot))
            if kind != "auto":
                raise OSError("an earlier snapshot of the stream still waits to be written")
            same.snapshot = snapshot
            return same.done

    def delete(self, stream: Stream) -> "Future[None]":
        """Delete a stream's folder in the background, and drop the automatic snapshots of it that still wait."""
        with self._changed:
            self._failed.pop(stream.id, None)
            self._tasks = deque(task for task in self._tasks if task.kind != "auto" or task.stream is not stream)
            return self._put(_Task(stream, None))

    def stop(self, seconds: float) -> bool:
        """Write the snapshots that wait, then end the thread; return whether that took less than `seconds`."""
        with self._changed:
            self._stopping = True
            self._changed.notify()
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _put(self, task: _Task) -> "Future[None]":
        if self._stopping:
            raise OSError("the server is stopping")
        self._tasks.append(task)
        self._changed.notify()
        return task.done

    def _work(self) -> None:
        while (task := self._next()) is not None:
            try:
                self._do(task)
            except Exception as error:  # no error may stop the writing of other streams
                self._note_failure(task, error)
            else:
                self._note_success(task)

    def _next(self) -> _Task | None:
        """Return the next task, or a failed one to retry if no other comes for a while; None at the end."""
        with self._changed:
            self._working = None
            while not self._tasks:
                if self._stopping:
                    return None
                if not self._changed.wait(_RETRY_SECONDS if self._failed else None) and self._failed:
                    self._tasks.append(self._failed.pop(next(iter(self._failed))))
            self._began, self._working = time.monotonic(), self._tasks.popleft()
            return self._working

    def _do(self, task: _Task) -> None:
        if task.snapshot is None:
            self._store.delete(task.stream.id)
        else:
            self._store.write(task.stream.id, task.snapshot)
            task.stream.disk = self._store.size(task.stream.id)
            task.stream.note_snapshot(task.snapshot)

    def _note_success(self, task: _Task) -> None:
        if self._failure is not None:
            _log.warning("the state folder can be written again")
        self._failure = None
        with self._changed:
            self._failed.pop(task.stream.id, None)
        self._on_written(True, time.monotonic() - self._began)
        task.done.set_result(None)

    def _note_failure(self, task: _Task, error: Exception) -> None:
        if not isinstance(error, OSError):
            _log.error("unexpected error of a write", exc_info=error, extra={"stream": task.stream.id})
            error = OSError(f"{type(error).__name__}: {error}")
        reason = str(error.strerror or error)
        if self._failure is None:
            _log.error("%s cannot be written: %s", self._store.folder, reason, extra={"stream": task.stream.id})
            task.stream.event("snapshot_failed", reason=reason)
        self._failure = reason
        if task.snapshot is not None:
            with self._changed:
                self._failed[task.stream.id] = _Task(task.stream, task.snapshot)
        self._on_written(False, 0.0)
        task.done.set_exception(error)
