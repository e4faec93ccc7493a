"""Runs the jobs of many streams on a few live models: one writer per stream, bounded queues, fair turns."""

import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from dpl.core.errors import DplError
from dpl.model.adaptive import AdaptiveModel
from dpl.serve.live import Job, LiveModel
from dpl.serve.monitoring import CURRENT
from dpl.serve.schemas import NoStream, Overloaded
from dpl.serve.store import StreamSnapshot
from dpl.serve.stream import Stream

if TYPE_CHECKING:
    from dpl.serve.server import Server

__all__ = ["Engine"]

_BURST = 4  # jobs of one stream in a row, before the next stream has its turn
_STOP_SHARE = 0.9  # of the time of a stop; the process needs the rest to end
_SPILL_SECONDS = 0.25  # a worker waits this long for the disk, below what a person or a camera notices
_log = logging.getLogger("dpl.serve")


class Engine:
    """All streams of a server and the threads that run their jobs.

    A few streams are on live models, more in memory as differences, and the rest on disk. A stream is used or moved
    only by the thread that marked it as running. A tenant is a prefix of stream names that has a token. Tenants take
    turns, and each has a place in the queue.
    """

    def __init__(self, models: list[AdaptiveModel], server: "Server") -> None:
        self._server, self._settings = server, server.settings
        self.models = [LiveModel(model, server) for model in models]
        tenants = server.tokens.tenants if server.tokens else ("",)
        self._waiting: Counter[str] = Counter(dict.fromkeys(tenants, 0))  # requests by tenant
        self._turn: dict[str, int] = dict.fromkeys(tenants, 0)  # a number that grows with each turn
        self._streams = {name: self._known(name) for name in server.store.stream_ids()}
        self._ready: list[Stream] = []  # those with jobs; the one that waits longest first
        self._lock = threading.RLock()
        self._job_seconds = 0.05
        self.accepting = True
        self._stop_by = math.inf
        self._threads = ThreadPoolExecutor(self._settings.workers, "dpl-serve")
        self._turns: set[Future[None]] = set()

    def _known(self, stream_id: str) -> Stream:
        """Return a stream from an earlier run; the state of its newest snapshot is read when it is first used."""
        store, stream = self._server.store, Stream(stream_id, self._settings.events_kept)
        stream.apply_snapshot(StreamSnapshot(store.names(stream_id)[0], {}, *store.counts(stream_id)))
        stream.unload()
        with suppress(OSError):
            stream.disk = store.size(stream_id)
        return stream

    @contextmanager
    def admit(self, stream_id: str, tenant: str, job: Job, *, create: bool) -> Iterator[Stream]:
        """Queue a job; the request has a place in the queues while the block runs. Raises Overloaded or NoStream."""
        with self._lock:
            stream = self._streams.get(stream_id) if create else self.find(stream_id)
            self._check_room(stream, tenant)
            if stream is None:
                self._check_quota(tenant)
                stream = self._streams[stream_id] = Stream(stream_id, self._settings.events_kept)
            stream.admitted += 1
            stream.tenant = tenant
            self._waiting[tenant] += 1
            stream.jobs.append(job)
            self._make_ready(stream)
        try:
            yield stream
        finally:
            with self._lock:
                stream.admitted -= 1
                self._waiting[tenant] -= 1
                self._forget_if_unused(stream)

    def _check_room(self, stream: Stream | None, tenant: str) -> None:
        settings = self._settings
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
        if absent and self._server.writer.problem and len(self._in_memory()) >= settings.max_streams_in_memory:
            raise Overloaded(503, "memory is full and the state folder cannot be written", 30)

    def _check_quota(self, tenant: str) -> None:
        """Refuse a new stream of a tenant that has too many, or too much on disk."""
        if not tenant:  # a token without a prefix is the operator's
            return
        mine = [stream for stream in self._streams.values() if stream.id.startswith(tenant)]
        disk = sum(stream.disk for stream in mine)
        if len(mine) >= self._settings.streams_per_token or disk >= self._settings.disk_per_token:
            reason = f"this token has {len(mine)} streams with {disk} bytes on disk (streams_per_token, disk_per_token)"
            raise Overloaded(429, f"{reason}; delete some", 60)

    def cancel(self, stream: Stream, job: Job) -> bool:
        """Drop a job that has not started; return whether that was possible."""
        with self._lock:
            if not job.future.cancel():
                return False
            if job in stream.jobs:
                stream.jobs.remove(job)
        self._server.metrics.cancelled.inc()
        return True

    def streams(self) -> list[Stream]:
        """Return all streams, in memory or on disk."""
        return list(self._streams.values())

    def find(self, stream_id: str) -> Stream:
        """Return a stream, or raise NoStream."""
        stream = self._streams.get(stream_id)
        if stream is None:
            raise NoStream(stream_id)
        return stream

    @property
    def admitted(self) -> int:
        """How many requests were accepted and have no response yet."""
        return self._waiting.total()

    # The end.

    @property
    def is_idle(self) -> bool:
        """Whether no thread runs a job, or will."""
        return not self._turns

    def begin_stop(self) -> None:
        """Accept no more requests; the time that a stop may take begins."""
        self.accepting = False
        self._stop_by = min(self._stop_by, time.monotonic() + _STOP_SHARE * self._settings.stop_seconds)

    def stop(self) -> None:
        """Finish the queued jobs, write every stream to disk, end the threads; all in the time that is left.

        A job that hangs gets half of that time. Its stream keeps its last snapshot; every other stream is written.
        """
        self.begin_stop()
        half = self._seconds_left() / 2
        while (turns := self._turns.copy()) and self._seconds_left() > half:
            wait(turns, self._seconds_left() - half)
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._save_idle()
        if self._server.writer.stop(self._seconds_left()):
            self._server.store.close()
        unsaved = [stream.id for stream in self.streams() if stream.changed > stream.saved]
        if unsaved:
            seconds = self._settings.stop_seconds
            _log.error("stopped after %.0f s; not on disk: the last batches of %s", seconds, ", ".join(unsaved[:20]))
        else:
            _log.info("stopped; every stream is on disk")

    def _seconds_left(self) -> float:
        return max(0.0, self._stop_by - time.monotonic())

    def _save_idle(self) -> None:
        """Save the streams in memory that no thread uses; as they count as running, none does any more."""
        with self._lock:
            idle = [stream for stream in self._in_memory() if not stream.running]
            for stream in idle:
                stream.running = True
        for stream in idle:
            try:
                self._save(stream)
            except Exception:  # every other stream is written all the same
                _log.exception("saving at a stop", extra={"stream": stream.id})

    # Turns.

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
            for live in self.models:
                if live.stream is stream:
                    live.release()

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
            if last is None or not last.holds:
                self._free(stream)
        try:
            self._spill()
        except Exception:
            _log.exception("moving streams to disk")

    def _run_jobs(self, stream: Stream) -> Job | None:
        """Run a few jobs of a stream; return the last one."""
        live = self._acquire(stream)
        for _ in range(_BURST):
            job = self._pop(stream)
            if job is not None:
                self._run(job, live)
            if job is None or job.holds or live.stream is not stream:  # the last two after a deletion, or an attempt
                break
        return job

    def _pop(self, stream: Stream) -> Job | None:
        with self._lock:
            while stream.jobs:
                job = stream.jobs.popleft()
                if job.future.set_running_or_notify_cancel():
                    return job
            return None

    def _run(self, job: Job, live: LiveModel) -> None:
        start, stream = time.monotonic(), live.stream
        with self._lock:  # the adaptation is optional if it exceeds the budget of the longest waiting request
            oldest = min((it.jobs[0].enqueued for it in (stream, *self._ready) if it.jobs), default=math.inf)
        job.busy = start - oldest + self._server.step_seconds > self._settings.latency_budget
        stream.used = time.time()
        try:
            job.act(job, live)
        except Exception as error:
            if not isinstance(error, (DplError, OSError)):
                _log.exception("request %s", job.request_id)
                self._server.metrics.failures.inc()
            stream.event("failed", request_id=job.request_id, reason=f"{type(error).__name__}: {error}")
            if not job.future.done():
                job.future.set_exception(error)
        self._job_seconds = 0.9 * self._job_seconds + 0.1 * (time.monotonic() - start)

    def end_delete(self, stream: Stream, deleted: "Future[None]") -> None:
        """Let a stream be used again, as a new one if its folder is gone."""
        if deleted.exception() is None:
            _log.info("deleted", extra={"stream": stream.id})
            stream.forget()
        self._free(stream)

    # Between live models, memory and disk.

    def _acquire(self, stream: Stream) -> LiveModel:
        """Put the stream on a live model: the one it is still on, or the one used least recently."""
        with self._lock:
            live = next((it for it in self.models if it.stream is stream), None) or min(
                (it for it in self.models if not it.stream.running),  # else another thread has that stream and model
                key=lambda it: it.used,
            )
            evicted, live.used = live.stream, time.monotonic()
            evicted.running = True
        try:
            live.load(stream)
        finally:
            if evicted is not stream:
                self._free(evicted)
        return live

    def _in_memory(self) -> list[Stream]:
        """Return the streams whose state is in memory; the caller holds the lock."""
        return [stream for stream in self._streams.values() if stream.difference is not None]

    def _spill(self) -> None:
        """Drop the least recently used streams from memory until few enough are there; write them first.

        Nobody waits long for that: a stream that is not on disk yet stays in memory, and is dropped another time.
        """
        while not self._server.writer.problem and (stream := self._reserve_surplus()) is not None:
            try:
                with suppress(OSError, TimeoutError):
                    self._save(stream).result(_SPILL_SECONDS)
                if stream.changed > stream.saved:
                    return
                stream.unload()
                self._server.metrics.spills.inc()
            finally:
                self._free(stream)

    def _reserve_surplus(self) -> Stream | None:
        """Mark the least recently used idle stream as running, if too many are in memory."""
        with self._lock:
            held = self._in_memory()
            idle = [stream for stream in held if not stream.running and not stream.admitted]
            if len(held) <= self._settings.max_streams_in_memory or not idle:
                return None
            stream = min(idle, key=lambda stream: stream.used)
            stream.running = True
            return stream

    def _save(self, stream: Stream) -> "Future[None]":
        """Take a stream off its live model, and let it be written if it has changed; no other thread may use it."""
        for live in self.models:
            if live.stream is stream:
                live.unload()
        if stream.changed > stream.saved and stream.difference is not None:
            return self._server.writer.save(stream, stream.as_snapshot("auto", stream.difference))
        saved: Future[None] = Future()
        saved.set_result(None)
        return saved
