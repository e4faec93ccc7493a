"""Runs the jobs of many streams on a few live models: one writer per stream, bounded queues, fair turns."""

import logging
import math
import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from functools import partial

from dpl.core.errors import DplError
from dpl.model.adaptive import AdaptiveModel
from dpl.serve.jobs import Delete, Job
from dpl.serve.logs import CURRENT
from dpl.serve.schemas import NoStream, Overloaded
from dpl.serve.session import LiveModel, ServerContext, Session
from dpl.serve.stream import Stream

__all__ = ["Engine", "ModelPool"]

_BURST = 4  # jobs of one stream in a row, before the next stream has its turn
_SPILL_SECONDS = 0.25  # a worker waits this long for the disk, below what a person or a camera notices
_log = logging.getLogger("dpl.serve")


class ModelPool:
    """Keeps a few streams on live models, more in memory as differences, and the rest on disk.

    A stream is moved only while it counts as running, so that one thread at a time touches it. `changed` is the
    engine's lock; `free` lets other threads run a stream again.
    """

    def __init__(
        self,
        models: list[AdaptiveModel],
        context: ServerContext,
        changed: threading.Condition,
        free: Callable[[Stream], None],
    ) -> None:
        self.models = [LiveModel(model) for model in models]
        self._context, self._changed, self._free = context, changed, free
        self._memory: OrderedDict[str, Stream] = OrderedDict()  # least recently used first

    @property
    def held(self) -> int:
        """The number of streams in memory."""
        return len(self._memory)

    @property
    def size(self) -> int:
        """The bytes of their states."""
        return sum(stream.difference.size for stream in self._memory.values() if stream.difference is not None)

    def acquire(self, stream: Stream) -> Session:
        """Put the stream on a live model: the one it is still on, or the one used least recently."""
        with self._changed:
            idle = [live for live in self.models if not live.busy]
            live = next((m for m in idle if m.stream is stream), None) or min(idle, key=lambda m: m.used)
            live.busy, live.used = True, time.monotonic()
            evicted = live.stream if live.stream is not stream else None
            if evicted is not None:
                evicted.running = True
        session = Session(stream, live, self._context)
        try:
            self._release_previous(evicted, live)
            session.load()
        except Exception:
            self.release(session)
            raise
        with self._changed:
            self._memory[stream.id] = stream
            self._memory.move_to_end(stream.id)
        return session

    def release(self, session: Session) -> None:
        """Let other streams use the live model; the stream stays on it until another one needs it."""
        with self._changed:
            session.live.busy = False

    def spill(self) -> None:
        """Drop the least recently used streams from memory until few enough are there; write them first.

        Nobody waits long for that: a stream that is not on disk yet stays in memory, and is dropped another time.
        """
        while not self._context.writer.problem and (stream := self._reserve_surplus()) is not None:
            try:
                self._release(stream)
                with suppress(OSError, TimeoutError):
                    self._save(stream).result(_SPILL_SECONDS)
                if stream.changed > stream.saved:
                    return
                with self._changed:
                    self._memory.pop(stream.id, None)
                stream.unload()
                self._context.metrics.spills.inc()
            finally:
                self._free(stream)

    def forget(self, stream: Stream) -> None:
        """Drop a deleted stream."""
        self._memory.pop(stream.id, None)
        for live in self.models:
            if live.stream is stream:
                live.stream = None

    def save_all(self) -> None:
        """Let every stream be written to disk; call it only after all threads have ended."""
        for stream in self._memory.values():
            self._release(stream)
            self._save(stream)

    def _release_previous(self, evicted: Stream | None, live: LiveModel) -> None:
        """Take the previous stream off a live model; it stays in memory."""
        if evicted is not None:
            try:
                Session(evicted, live, self._context).unload()
            finally:
                self._free(evicted)

    def _reserve_surplus(self) -> Stream | None:
        """Mark the least recently used idle stream as running, if too many are in memory."""
        with self._changed:
            if len(self._memory) <= self._context.settings.max_streams_in_memory:
                return None
            stream = next((s for s in self._memory.values() if not s.running and not s.admitted), None)
            if stream is not None:
                stream.running = True
            return stream

    def _release(self, stream: Stream) -> None:
        """Take a stream off its live model, if it is on one."""
        with self._changed:
            live = next((live for live in self.models if live.stream is stream), None)
            if live is None:
                return
            live.busy = True
        session = Session(stream, live, self._context)
        try:
            session.unload()
        finally:
            self.release(session)

    def _save(self, stream: Stream) -> "Future[None]":
        """Let a stream that is on no live model be written, if it has changed."""
        if stream.changed <= stream.saved or stream.difference is None:
            saved: Future[None] = Future()
            saved.set_result(None)
            return saved
        stream.captured = stream.steps
        return self._context.writer.save(stream, stream.as_snapshot("auto", stream.difference))


class Engine:
    """All streams of a server and the threads that run their jobs.

    A tenant is a prefix of stream names that has a token. Tenants take turns, and each has a place in the queue.
    """

    def __init__(self, models: list[AdaptiveModel], context: ServerContext, tenants: Collection[str] = ("",)) -> None:
        self.context = context
        self._waiting: Counter[str] = Counter(dict.fromkeys(tenants, 0))  # requests by tenant
        self._turn: dict[str, int] = dict.fromkeys(tenants, 0)  # a number that grows with each turn
        self._streams = {name: self._known(name) for name in context.store.stream_ids()}
        self._ready: deque[Stream] = deque()
        self._changed = threading.Condition()
        self.pool = ModelPool(models, context, self._changed, self._free)
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

    # Called by the web application.

    @contextmanager
    def admit(self, stream_id: str, tenant: str = "", *, create: bool = False) -> Iterator[Stream]:
        """Take a place in the queues while the block runs; raises Overloaded or NoStream."""
        with self._changed:
            stream = self._streams.get(stream_id)
            if stream is None and not create:
                raise NoStream(stream_id)
            self._check_room(stream, tenant)
            if stream is None:
                self._check_quota(tenant)
                stream = self._streams[stream_id] = Stream(stream_id, self.context.settings.events_kept)
            stream.admitted += 1
            stream.tenant = tenant
            self._admitted += 1
            self._waiting[tenant] += 1
        try:
            yield stream
        finally:
            with self._changed:
                stream.admitted -= 1
                self._admitted -= 1
                self._waiting[tenant] -= 1
                self._forget_if_unused(stream)

    def submit(self, stream: Stream, job: Job) -> None:
        """Queue a job of an admitted request."""
        with self._changed:
            stream.jobs.append(job)
            self._make_ready(stream)

    def cancel(self, stream: Stream, job: Job) -> bool:
        """Drop a job that has not started; return whether that was possible."""
        with self._changed:
            if not job.future.cancel():
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
        """Return a stream, or raise NoStream."""
        with self._changed:
            if stream_id not in self._streams:
                raise NoStream(stream_id)
            return self._streams[stream_id]

    def read_counts(self, stream: Stream) -> None:
        """Read the counts of a stream from an earlier run, before it is used for the first time."""
        adapted, images = self.context.store.counts(stream.id)
        with self._changed:
            if stream.unread and not stream.running:
                stream.adapted, stream.images = adapted, images

    def facts(self) -> dict[str, tuple[str, float]]:
        """Return the present figures of the server: name, meaning, value."""
        with self._changed:
            known, admitted = len(self._streams), self._admitted
            held, size = self.pool.held, self.pool.size
        return {
            "dpl_streams": ("Streams known", known),
            "dpl_streams_in_memory": ("Streams whose state is in memory", held),
            "dpl_delta_bytes": ("Memory used by the states of streams", size),
            "dpl_queue": ("Requests accepted and not yet answered", admitted),
            "dpl_storage_ok": ("1 while the state folder can be written", float(self.context.writer.problem is None)),
            "dpl_step_seconds": ("Time of one adaptation, smoothed", self.context.step_seconds),
        }

    @property
    def alive(self) -> bool:
        """Whether all worker threads run."""
        return self._stopping or all(thread.is_alive() for thread in self._threads)

    def stop(self, seconds: float) -> None:
        """Finish the queued jobs, write every stream to disk, end the threads; give up after `seconds`."""
        end = time.monotonic() + seconds
        with self._changed:
            self.accepting, self._stopping = False, True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))
        if not any(thread.is_alive() for thread in self._threads):
            self.pool.save_all()
        if self.context.writer.stop(max(0.0, end - time.monotonic())):
            self.context.store.close()
        unsaved = [stream.id for stream in self.streams() if stream.changed > stream.saved]
        if unsaved:
            _log.error("stopped after %.0f s; not on disk: the last batches of %s", seconds, ", ".join(unsaved[:20]))
        else:
            _log.info("stopped; every stream is on disk")

    # Internal.

    def _known(self, stream_id: str) -> Stream:
        """Return a stream from an earlier run; its newest snapshot is read when it is first used."""
        stream = Stream(stream_id, self.context.settings.events_kept)
        newest = self.context.store.names(stream_id)[0]
        stream.seq = stream.changed = stream.saved = newest.seq
        stream.version, stream.unread = newest.version, True
        with suppress(OSError):
            stream.disk = self.context.store.size(stream_id)
        return stream

    def _check_room(self, stream: Stream | None, tenant: str) -> None:
        settings = self.context.settings
        others = sum(1 for name, count in self._waiting.items() if not count and name != tenant)
        kept = min(others, settings.queue - 1) if self._waiting[tenant] else 0  # a place for each of the others
        wait = min(30, max(1, math.ceil(self._admitted * self._job_seconds / settings.workers)))
        if not self.accepting:
            raise Overloaded(503, "the server is stopping", 5)
        if self._admitted + kept >= settings.queue:
            raise Overloaded(503, f"{self._admitted} requests are waiting (queue={settings.queue})", wait)
        if stream is not None and stream.admitted >= settings.queue_per_stream:
            reason = f"{stream.admitted} requests wait for this stream (queue_per_stream={settings.queue_per_stream})"
            raise Overloaded(429, reason, wait)
        if stream is None and len(self._streams) >= settings.max_streams:
            raise Overloaded(429, f"there are {len(self._streams)} streams (max_streams); delete some", 60)
        full = self.pool.held >= settings.max_streams_in_memory
        if full and self.context.writer.problem and (stream is None or stream.difference is None):
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

    def _forget_if_unused(self, stream: Stream) -> None:
        """Drop a stream that was deleted, or whose first request was refused or cancelled."""
        if stream.seq == 0 and not stream.admitted and not stream.running:
            self._streams.pop(stream.id, None)
            self.pool.forget(stream)

    def _work(self) -> None:
        while (stream := self._next()) is not None:
            deleted: Future[None] | None = None
            token = CURRENT.set(stream.id)
            try:
                deleted = self._run_jobs(stream)
            except Exception as error:  # the thread must survive any error of one stream
                _log.exception("jobs of a stream")
                while (job := self._pop(stream)) is not None:
                    job.future.set_exception(error)
            finally:
                CURRENT.reset(token)
                if deleted is None:
                    self._free(stream)
                else:  # nobody uses the stream before its folder is gone
                    deleted.add_done_callback(partial(self._end_delete, stream))
            self.pool.spill()

    def _run_jobs(self, stream: Stream) -> "Future[None] | None":
        """Run a few jobs of a stream; return what the next ones must wait for."""
        session = self.pool.acquire(stream)
        try:
            for _ in range(_BURST):
                job = self._pop(stream)
                if job is None:
                    return None
                self._run(job, session)
                if isinstance(job, Delete):
                    return job.written
        finally:
            self.pool.release(session)
        return None

    def _end_delete(self, stream: Stream, deleted: "Future[None]") -> None:
        if deleted.exception() is None:
            _log.info("deleted", extra={"stream": stream.id})
            stream.forget()
        self._free(stream)

    def _next(self) -> Stream | None:
        """Return a stream with jobs: of the tenant whose last turn is longest ago, the one that waits longest."""
        with self._changed:
            while True:
                ready = [stream for stream in self._ready if not stream.running]
                if ready:
                    break
                if self._stopping and not self._ready:
                    return None
                self._changed.wait()
            stream = min(ready, key=lambda stream: self._turn.get(stream.tenant, 0))
            self._ready.remove(stream)
            self._turn[stream.tenant] = max(self._turn.values(), default=0) + 1
            stream.running = True
            return stream

    def _pop(self, stream: Stream) -> Job | None:
        with self._changed:
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
            self._changed.notify_all()

    def _make_ready(self, stream: Stream) -> None:
        if not stream.running and stream not in self._ready:
            self._ready.append(stream)
            self._changed.notify()
