"""Runs the jobs of many streams on a few live models: one writer for each stream, bounded queues, fair turns."""

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from dpl.core.errors import DplError
from dpl.model.adaptive import AdaptiveModel
from dpl.serve.jobs import Job
from dpl.serve.residence import Residence
from dpl.serve.session import Context, Session
from dpl.serve.stream import Stream

__all__ = ["Engine", "Overloaded"]

_BURST = 4  # jobs of one stream done in a row before the next stream has its turn
_log = logging.getLogger("dpl.serve")


class Overloaded(DplError):  # noqa: N818 - the state of the server, not of the program
    """A request that cannot be taken now."""

    def __init__(self, status: int, reason: str, retry_after: int) -> None:
        super().__init__(reason)
        self.status, self.retry_after = status, retry_after


class Engine:
    """All streams of a server and the threads that serve them."""

    def __init__(self, models: list[AdaptiveModel], context: Context) -> None:
        self.context = context
        self._streams = {name: self._known(name) for name in context.store.stream_ids()}
        self._ready: deque[Stream] = deque()
        self._changed = threading.Condition()
        self._residence = Residence(models, context, self._changed, self._free)
        self._admitted = 0
        self._job_seconds = 0.05
        self.accepting = True
        self._stopping = False
        self._threads = [
            threading.Thread(target=self._work, name=f"dpl-serve-{i}", daemon=True)
            for i in range(context.settings.workers)
        ]
        for thread in self._threads:
            thread.start()

    # What the web side calls.

    @contextmanager
    def admit(self, stream_id: str, *, create: bool = False) -> Iterator[Stream]:
        """Take a place in the queues for the length of the block, or raise Overloaded; KeyError: no such stream."""
        with self._changed:
            stream = self._streams.get(stream_id)
            if stream is None and not create:
                raise KeyError(stream_id)
            self._check_room(stream)
            if stream is None:
                stream = self._streams[stream_id] = Stream(stream_id, self.context.settings.history)
            stream.admitted += 1
            self._admitted += 1
        try:
            yield stream
        finally:
            with self._changed:
                stream.admitted -= 1
                self._admitted -= 1
                self._forget_if_unused(stream)

    def submit(self, stream: Stream, job: Job) -> None:
        """Queue a job of an admitted request."""
        with self._changed:
            stream.jobs.append(job)
            self._make_ready(stream)

    def cancel(self, stream: Stream, job: Job) -> bool:
        """Drop a job that has not begun; return whether that was so."""
        with self._changed:
            if not job.answer.cancel():
                return False
            if job in stream.jobs:
                stream.jobs.remove(job)
        self.context.metrics.cancelled.inc()
        return True

    def streams(self) -> list[Stream]:
        """Return all streams, in memory or on disk."""
        with self._changed:
            return list(self._streams.values())

    def find(self, stream_id: str) -> Stream:
        """Return a stream, or raise KeyError."""
        with self._changed:
            return self._streams[stream_id]

    def acquaint(self, stream: Stream) -> None:
        """Learn what a stream of an earlier run has seen, before it is used for the first time."""
        if not stream.unread or stream.images:
            return
        adapted, images = self.context.store.counts(stream.id)
        with self._changed:
            if stream.unread and not stream.running:
                stream.adapted, stream.images = adapted, images

    def facts(self) -> dict[str, tuple[str, float]]:
        """Return the present figures of the server: name, meaning, value."""
        with self._changed:
            known, admitted = len(self._streams), self._admitted
            held, size = self._residence.held, self._residence.size
        return {
            "dpl_streams": ("Streams known", known),
            "dpl_streams_in_memory": ("Streams whose state is in memory", held),
            "dpl_delta_bytes": ("Memory taken by what the streams have learned", size),
            "dpl_queue": ("Requests admitted and not yet answered", admitted),
            "dpl_storage_ok": ("1 while the state folder can be written", float(self.context.writer.problem is None)),
            "dpl_step_seconds": ("Time of one adaptation, smoothed", self.context.step_seconds),
        }

    @property
    def alive(self) -> bool:
        """Whether every thread that should run does."""
        return self._stopping or all(thread.is_alive() for thread in self._threads)

    def stop(self) -> None:
        """Finish what is queued, put everything on the disk, end."""
        with self._changed:
            self.accepting, self._stopping = False, True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()
        self._residence.save_all()
        self.context.writer.stop()
        self.context.store.close()

    # Inside.

    def _known(self, stream_id: str) -> Stream:
        """Return a stream of an earlier run; its newest snapshot is read when it is first used."""
        stream = Stream(stream_id, self.context.settings.history)
        newest = self.context.store.names(stream_id)[0]
        stream.seq = stream.changed = stream.saved = newest.seq
        stream.version, stream.unread = newest.version, True
        return stream

    def _check_room(self, stream: Stream | None) -> None:
        settings = self.context.settings
        wait = min(30, max(1, math.ceil(self._admitted * self._job_seconds / settings.workers)))
        if not self.accepting:
            raise Overloaded(503, "the server is stopping", 5)
        if self._admitted >= settings.queue:
            raise Overloaded(503, f"{self._admitted} requests are waiting (queue={settings.queue})", wait)
        if stream is not None and stream.admitted >= settings.queue_per_stream:
            reason = f"{stream.admitted} requests wait for this stream (queue_per_stream={settings.queue_per_stream})"
            raise Overloaded(429, reason, wait)
        if stream is None and len(self._streams) >= settings.max_streams:
            raise Overloaded(429, f"there are {len(self._streams)} streams (max_streams); delete some", 60)
        full = self._residence.held >= settings.max_streams_in_memory
        if full and self.context.writer.problem and (stream is None or stream.delta is None):
            raise Overloaded(503, "memory is full and the state folder cannot be written", 30)

    def _forget_if_unused(self, stream: Stream) -> None:
        """Leave no trace of a stream whose first request was refused or given up, or that was deleted."""
        if stream.seq == 0 and not stream.admitted and not stream.running and not self.context.store.names(stream.id):
            self._streams.pop(stream.id, None)
            self._residence.forget(stream)

    def _work(self) -> None:
        while (stream := self._next()) is not None:
            session = None
            try:
                session = self._residence.bring(stream)
                for _ in range(_BURST):
                    job = self._pop(stream)
                    if job is None:
                        break
                    self._run(job, session)
            except Exception as error:  # the thread must outlive whatever one stream does
                _log.exception("stream %s", stream.id)
                self._fail_all(stream, error)
            finally:
                self._residence.release(session)
                self._free(stream)
            self._residence.shrink()

    def _next(self) -> Stream | None:
        with self._changed:
            while not self._ready:
                if self._stopping:
                    return None
                self._changed.wait()
            stream = self._ready.popleft()
            if stream.running:  # it is just being moved; whoever does that makes it ready again
                return self._next()
            stream.running = True
            return stream

    def _pop(self, stream: Stream) -> Job | None:
        with self._changed:
            while stream.jobs:
                job = stream.jobs.popleft()
                if job.answer.set_running_or_notify_cancel():
                    return job
            return None

    def _run(self, job: Job, session: Session) -> None:
        start = time.monotonic()
        try:
            job.run(session, self._is_busy(session.stream))
        except Exception as error:
            if not isinstance(error, (DplError, OSError)):
                _log.exception("stream %s, request %s", session.stream.id, job.request_id)
                self.context.metrics.failures.inc()
            session.stream.event("failed", request_id=job.request_id, reason=f"{type(error).__name__}: {error}")
            if not job.answer.done():
                job.answer.set_exception(error)
        self._job_seconds = 0.9 * self._job_seconds + 0.1 * (time.monotonic() - start)

    def _is_busy(self, stream: Stream) -> bool:
        """Say whether one more adaptation would make the longest waiting request wait too long."""
        with self._changed:
            oldest = min((s.jobs[0].enqueued for s in (stream, *self._ready) if s.jobs), default=None)
        if oldest is None:
            return False
        return time.monotonic() - oldest + self.context.step_seconds > self.context.settings.latency_budget

    def _free(self, stream: Stream) -> None:
        """Let other threads run the stream again."""
        with self._changed:
            stream.running = False
            if stream.jobs:
                self._make_ready(stream)
            self._forget_if_unused(stream)

    def _make_ready(self, stream: Stream) -> None:
        if not stream.running and stream not in self._ready:
            self._ready.append(stream)
            self._changed.notify()

    def _fail_all(self, stream: Stream, error: Exception) -> None:
        while (job := self._pop(stream)) is not None:
            job.answer.set_exception(error)
