"""Runs the jobs of many streams on a few live models: one writer per stream, bounded queues, fair turns."""

import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Collection, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

from dpl.core.errors import DplError
from dpl.model.adaptive import AdaptiveModel
from dpl.serve.jobs import Delete, Job
from dpl.serve.logs import CURRENT
from dpl.serve.pool import ModelPool
from dpl.serve.schemas import NoStream, Overloaded
from dpl.serve.session import ServerContext, Session
from dpl.serve.stream import Stream

__all__ = ["Engine"]

_BURST = 4  # jobs of one stream in a row, before the next stream has its turn
_STOP_SHARE = 0.9  # of the time of a stop; the process needs the rest to end
_log = logging.getLogger("dpl.serve")


class Engine:
    """All streams of a server and the threads that run their jobs.

    A tenant is a prefix of stream names that has a token. Tenants take turns, and each has a place in the queue.
    """

    def __init__(self, models: list[AdaptiveModel], context: ServerContext, tenants: Collection[str] = ("",)) -> None:
        self.context = context
        self._waiting: Counter[str] = Counter(dict.fromkeys(tenants, 0))  # requests by tenant
        self._turn: dict[str, int] = dict.fromkeys(tenants, 0)  # a number that grows with each turn
        self._streams = {name: self._known(name) for name in context.store.stream_ids()}
        self._ready: list[Stream] = []  # those with jobs; the one that waits longest first
        self._lock = threading.RLock()
        self.pool = ModelPool(models, context, self._streams, self._lock, self._free)
        self._job_seconds = 0.05
        self.accepting = True
        self._stop_by = math.inf
        self._threads = ThreadPoolExecutor(context.settings.workers, "dpl-serve")
        self._turns: set[Future[None]] = set()

    # Called by the web application.

    @contextmanager
    def admit(self, stream_id: str, tenant: str = "", *, create: bool = False) -> Iterator[Stream]:
        """Take a place in the queues while the block runs; raises Overloaded or NoStream."""
        with self._lock:
            stream = self._streams.get(stream_id)
            if stream is None and not create:
                raise NoStream(stream_id)
            self._check_room(stream, tenant)
            if stream is None:
                self._check_quota(tenant)
                stream = self._streams[stream_id] = Stream(stream_id, self.context.settings.events_kept)
            stream.admitted += 1
            stream.tenant = tenant
            self._waiting[tenant] += 1
        try:
            yield stream
        finally:
            with self._lock:
                stream.admitted -= 1
                self._waiting[tenant] -= 1
                self._forget_if_unused(stream)

    def submit(self, stream: Stream, job: Job) -> None:
        """Queue a job of an admitted request."""
        with self._lock:
            stream.jobs.append(job)
            self._make_ready(stream)

    def cancel(self, stream: Stream, job: Job) -> bool:
        """Drop a job that has not started; return whether that was possible."""
        with self._lock:
            if not job.future.cancel():
                return False
            if job in stream.jobs:
                stream.jobs.remove(job)
        self.context.metrics.cancelled.inc()
        return True

    def streams(self) -> list[Stream]:
        """Return all streams, in memory or on disk."""
        with self._lock:
            return list(self._streams.values())

    def find(self, stream_id: str) -> Stream:
        """Return a stream, or raise NoStream."""
        with self._lock:
            if stream_id not in self._streams:
                raise NoStream(stream_id)
            return self._streams[stream_id]

    def describe(self, stream: Stream) -> dict[str, Any]:
        """Return the status of a stream."""
        return stream.describe(self.context.names, self.context.settings.snapshot_every)

    @property
    def admitted(self) -> int:
        """How many requests were accepted and have no response yet."""
        return self._waiting.total()

    @property
    def is_idle(self) -> bool:
        """Whether no thread runs a job, or will."""
        return not self._turns

    def begin_stop(self) -> None:
        """Accept no more requests; the time that a stop may take begins."""
        self.accepting = False
        self._stop_by = min(self._stop_by, time.monotonic() + _STOP_SHARE * self.context.settings.stop_seconds)

    def stop(self) -> None:
        """Finish the queued jobs, write every stream to disk, end the threads; all in the time that is left.

        A job that hangs gets half of that time. Its stream keeps its last snapshot; every other stream is written.
        """
        self.begin_stop()
        half = self._seconds_left() / 2
        while (turns := self._turns.copy()) and self._seconds_left() > half:
            wait(turns, self._seconds_left() - half)
        self._threads.shutdown(wait=False, cancel_futures=True)
        for stream in self._reserve_idle():
            try:
                self.pool.save(stream)
            except Exception:  # every other stream is written all the same
                _log.exception("saving at a stop", extra={"stream": stream.id})
        if self.context.writer.stop(self._seconds_left()):
            self.context.store.close()
        unsaved = [stream.id for stream in self.streams() if stream.changed > stream.saved]
        if unsaved:
            seconds = self.context.settings.stop_seconds
            _log.error("stopped after %.0f s; not on disk: the last batches of %s", seconds, ", ".join(unsaved[:20]))
        else:
            _log.info("stopped; every stream is on disk")

    # Internal.

    def _seconds_left(self) -> float:
        return max(0.0, self._stop_by - time.monotonic())

    def _reserve_idle(self) -> list[Stream]:
        """Mark the streams in memory that no thread uses as running, so that none does any more."""
        with self._lock:
            idle = [stream for stream in self.pool.in_memory() if not stream.running]
            for stream in idle:
                stream.running = True
            return idle

    def _known(self, stream_id: str) -> Stream:
        """Return a stream from an earlier run; the state of its newest snapshot is read when it is first used."""
        store, stream = self.context.store, Stream(stream_id, self.context.settings.events_kept)
        newest = store.names(stream_id)[0]
        stream.seq = stream.changed = stream.saved = newest.seq
        stream.version = newest.version
        stream.adapted, stream.images = store.counts(stream_id)
        with suppress(OSError):
            stream.disk = store.size(stream_id)
        return stream

    def _check_room(self, stream: Stream | None, tenant: str) -> None:
        settings = self.context.settings
        others = sum(1 for name, count in self._waiting.items() if not count and name != tenant)
        kept = min(others, settings.queue - 1) if self._waiting[tenant] else 0  # a place for each of the others
        pause = min(30, max(1, math.ceil(self.admitted * self._job_seconds / settings.workers)))
        if not self.accepting:
            raise Overloaded(503, "the server is stopping", 5)
        if self.admitted + kept >= settings.queue:
            raise Overloaded(503, f"{self.admitted} requests are waiting (queue={settings.queue})", pause)
        if stream is not None and stream.admitted >= settings.queue_per_stream:
            reason = f"{stream.admitted} requests wait for this stream (queue_per_stream={settings.queue_per_stream})"
            raise Overloaded(429, reason, pause)
        if stream is None and len(self._streams) >= settings.max_streams:
            raise Overloaded(429, f"there are {len(self._streams)} streams (max_streams); delete some", 60)
        absent = stream is None or stream.difference is None
        if absent and self.context.writer.problem and len(self.pool.in_memory()) >= settings.max_streams_in_memory:
            raise Overloaded(503, "memory is full and the state folder cannot be written", 30)

    def _check_quota(self, tenant: str) -> None:
        """Refuse a new stream of a tenant that has too many, or too much on disk."""
        settings = self.context.settings
        if not tenant:  # a token without a prefix is the operator's
            return
        mine = [stream for stream in self._streams.values() if stream.id.startswith(tenant)]
        disk = sum(stream.disk for stream in mine)
        if len(mine) >= settings.streams_per_token or disk >= settings.disk_per_token:
            reason = f"this token has {len(mine)} streams with {disk} bytes on disk (streams_per_token, disk_per_token)"
            raise Overloaded(429, f"{reason}; delete some", 60)

    def _make_ready(self, stream: Stream) -> None:
        """Let a worker take the turn of some stream, as this one has a job; the caller holds the lock."""
        if not stream.running:
            if stream not in self._ready:
                self._ready.append(stream)
            turn = self._threads.submit(self._take_turn)
            self._turns.add(turn)
            turn.add_done_callback(self._turns.discard)

    def _free(self, stream: Stream) -> None:
        """Let other threads run the stream again."""
        with self._lock:
            stream.running = False
            if stream.jobs:
                self._make_ready(stream)
            self._forget_if_unused(stream)

    def _forget_if_unused(self, stream: Stream) -> None:
        """Drop a stream that was deleted, or whose first request was refused or cancelled."""
        if stream.seq == 0 and not stream.admitted and not stream.running:
            self._streams.pop(stream.id, None)
            self.pool.forget(stream)

    def _take_turn(self) -> None:
        """Run jobs of a stream: of the tenant whose last turn is longest ago, the one that waits longest."""
        with self._lock:
            ready = [stream for stream in self._ready if not stream.running]
            if not ready:  # another thread had the jobs, or will call again when it is done with their stream
                return
            stream = min(ready, key=lambda stream: self._turn.get(stream.tenant, 0))
            self._ready.remove(stream)
            self._turn[stream.tenant] = max(self._turn.values(), default=0) + 1
            stream.running = True
        last: Job | None = None
        token = CURRENT.set(stream.id)
        try:
            last = self._run_jobs(stream)
        except Exception as error:  # the state of the stream could not be loaded
            _log.exception("jobs of a stream")
            while (job := self._pop(stream)) is not None:
                job.future.set_exception(error)
        finally:
            CURRENT.reset(token)
            if isinstance(last, Delete) and last.deleted is not None:  # nobody uses the stream until its folder is gone
                last.deleted.add_done_callback(partial(self._end_delete, stream, last))
            else:
                self._free(stream)
        try:
            self.pool.spill()
        except Exception:
            _log.exception("moving streams to disk")

    def _run_jobs(self, stream: Stream) -> Job | None:
        """Run a few jobs of a stream; return the last one."""
        session, job = self.pool.acquire(stream), None
        try:
            for _ in range(_BURST):
                job = self._pop(stream)
                if job is not None:
                    self._run(job, session)
                if job is None or isinstance(job, Delete):
                    break
            return job
        finally:
            session.live.busy = False

    def _end_delete(self, stream: Stream, job: Delete, deleted: "Future[None]") -> None:
        error = deleted.exception()
        if error is None:
            _log.info("deleted", extra={"stream": stream.id})
            stream.forget()
        self._free(stream)
        if job.written is not None:
            job.written.set_result(None) if error is None else job.written.set_exception(error)

    def _pop(self, stream: Stream) -> Job | None:
        with self._lock:
            while stream.jobs:
                job = stream.jobs.popleft()
                if job.future.set_running_or_notify_cancel():
                    return job
            return None

    def _run(self, job: Job, session: Session) -> None:
        start = time.monotonic()
        try:
            job.run(session, self._is_busy(session.stream))
        except Exception as error:
            if not isinstance(error, (DplError, OSError)):
                _log.exception("request %s", job.request_id)
                self.context.metrics.failures.inc()
            session.stream.event("failed", request_id=job.request_id, reason=f"{type(error).__name__}: {error}")
            if not job.future.done():
                job.future.set_exception(error)
        self._job_seconds = 0.9 * self._job_seconds + 0.1 * (time.monotonic() - start)

    def _is_busy(self, stream: Stream) -> bool:
        """Return whether one more adaptation would exceed the latency budget of the longest waiting request."""
        with self._lock:
            oldest = min((s.jobs[0].enqueued for s in (stream, *self._ready) if s.jobs), default=math.inf)
        return time.monotonic() - oldest + self.context.step_seconds > self.context.settings.latency_budget
