"""A server: its streams and live models, and the threads that run the jobs: bounded queues, fair turns."""

import logging
import math
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import replace
from typing import Any

from dpl.core.errors import DplError, SettingError
from dpl.data.transforms import Evaluation
from dpl.model.adaptive import AdaptiveModel
from dpl.serve.decoding import DecoderPool, RequestDecoder
from dpl.serve.live import Job, LiveModel, SourceState, probe
from dpl.serve.middleware import Tokens
from dpl.serve.monitoring import CURRENT, Metrics
from dpl.serve.schemas import Overloaded, no_stream
from dpl.serve.settings import ServeSettings
from dpl.serve.store import StreamStore, Writer
from dpl.serve.stream import Stream

__all__ = ["Server"]

_BURST = 4  # jobs of one stream in a row, as putting its state on a model takes time
_STOP_SHARE = 0.9  # of the time of a stop; the process needs the rest to end
_SPILL_SECONDS = 0.25  # a worker waits this long for the disk, below what a person or a camera notices
_log = logging.getLogger("dpl.serve")


class Server:
    """All streams of a server and the threads that run their jobs.

    A few streams are on live models, more in memory as differences, and the rest on disk. A stream is used or moved
    only by the thread that marked it as running. A tenant is a prefix of stream names that has a token. Tenants take
    turns, and each has a place in the queue.

    `make` returns a new adaptive model at each call, `shape` is the shape of one image, `names` are the class names.
    `identity` has more that the state of a stream depends on; a state folder with other values is refused.
    """

    def __init__(
        self,
        make: Callable[[], AdaptiveModel],
        transform: Evaluation,
        shape: tuple[int, ...],
        settings: ServeSettings,
        *,
        names: Sequence[str] = (),
        tokens: Tokens | None = None,
        identity: Mapping[str, Any] | None = None,
    ) -> None:
        models = [make() for _ in range(settings.live_models)]
        probes = [probe(model, shape) for model in models]
        outputs = probes[0][0]
        if names and len(names) != outputs:
            raise SettingError(f"{len(names)} class names for a network with {outputs} outputs; expected {outputs}")
        self.settings, self.tokens, self.names = settings, tokens, tuple(names) or (None,) * outputs
        self.first = all(before for _, before in probes)  # respond, then adapt
        self.about = {**models[0].identity(), "layout": "as_is", "input": list(shape), **(identity or {})}
        self.store, self.metrics = StreamStore(settings.state, self.about, settings.keep_snapshots), Metrics(self)
        self.about |= {"shape": list(shape), "classes": list(names), "answers_first": self.first, "outputs": outputs}
        self.source, self.step_seconds = SourceState(models[0].state_dict()), 0.0  # of one adaptation, smoothed
        self.writer = Writer(self.store, self.metrics, settings.slow_disk)
        self.decoders = DecoderPool(RequestDecoder(transform, shape, settings.max_batch, settings.max_pixels), settings)
        self.models = [LiveModel(model, self) for model in models]
        self._open_queue(tokens.tenants if tokens else {""})

    def _open_queue(self, tenants: Collection[str]) -> None:
        self._turn = dict.fromkeys(tenants, 0)  # a number that grows with each turn
        self._jobs: list[Job] = []  # those without a result, in the order of their requests
        self._streams = {name: self._known(name) for name in self.store.stream_ids()}
        self._lock = threading.RLock()
        self.accepting = True
        self._stop_by = math.inf
        self._threads = ThreadPoolExecutor(self.settings.workers, "dpl-serve")
        self._turns: set[Future[None]] = set()

    def _known(self, stream_id: str) -> Stream:
        """Return a stream from an earlier run; the state of its newest snapshot is read when it is first used."""
        store, stream = self.store, Stream(stream_id)
        newest, (adapted, images) = store.snapshots(stream_id)[0], store.counts(stream_id)
        stream.apply_snapshot(replace(newest, adapted=adapted, images=images))
        stream.unload()
        with suppress(OSError):
            stream.disk = store.size(stream_id)
        return stream

    def streams(self) -> list[Stream]:
        """Return all streams, in memory or on disk."""
        return list(self._streams.values())

    def find(self, stream_id: str) -> Stream:
        """Return a stream, or raise the error for one that does not exist."""
        stream = self._streams.get(stream_id)
        if stream is None:
            raise no_stream(stream_id)
        return stream

    @property
    def problems(self) -> list[str]:
        """The present problems, if there are any. They name neither streams nor folders: anyone may read them."""
        problems, failure = [], self.writer.problem
        if failure is not None:
            adaptation = "goes on" if self.settings.on_storage_failure == "adapt" else "is paused"
            problems.append(f"the state folder cannot be written ({failure}); adaptation {adaptation}; retrying")
        refused = sum(stream.refused for stream in self.streams())
        if refused:
            problems.append(f"{refused} streams started over, as no snapshot of theirs could be read; reset them")
        return problems

    # The queue.

    def admitted(self, stream: Stream | None = None) -> int:
        """Return how many requests, of one stream or of all, were accepted and have no result yet."""
        return sum(stream in (None, job.stream) for job in self._jobs.copy())

    def admit(self, stream_id: str, tenant: str, job: Job, *, create: bool) -> None:
        """Queue a job; it has a place in the queues until it has a result. Raises errors of HTTP."""
        with self._lock:
            stream = self._streams.get(stream_id) if create else self.find(stream_id)
            self._check_room(stream, tenant)
            if stream is None:
                self._check_quota(tenant)
                stream = self._streams[stream_id] = Stream(stream_id)
            job.stream, job.tenant = stream, tenant
            job.future.add_done_callback(lambda _: self._release(job))
            self._jobs.append(job)
            self._offer_turn()

    def _release(self, job: Job) -> None:
        with self._lock:
            self._jobs.remove(job)
            self._forget_if_unused(job.stream)

    def _check_room(self, stream: Stream | None, tenant: str) -> None:
        settings, total, served = self.settings, len(self._jobs), {job.tenant for job in self._jobs}
        kept = min(len(self._turn.keys() - served), settings.queue - 1) if tenant in served else 0  # for the others
        pause = min(30, max(1, math.ceil(total * self.step_seconds / settings.workers)))
        if not self.accepting:
            raise Overloaded(503, "the server is stopping", 5)
        if total + kept >= settings.queue:
            raise Overloaded(503, f"{total} requests are waiting (queue={settings.queue})", pause)
        if stream is not None and self.admitted(stream) >= settings.queue_per_stream:
            raise Overloaded(
                429, f"{settings.queue_per_stream} requests wait for this stream (queue_per_stream)", pause
            )
        if stream is None and len(self._streams) >= settings.max_streams:
            raise Overloaded(429, f"there are {len(self._streams)} streams (max_streams); delete some", 60)
        absent = stream is None or stream.difference is None
        if absent and self.writer.problem and len(self._in_memory()) >= settings.max_streams_in_memory:
            raise Overloaded(503, "memory is full and the state folder cannot be written", 30)

    def _check_quota(self, tenant: str) -> None:
        """Refuse a new stream of a tenant that has too many, or too much on disk."""
        if not tenant:  # a token without a prefix is the operator's
            return
        mine = [stream for stream in self._streams.values() if stream.id.startswith(tenant)]
        disk = sum(stream.disk for stream in mine)
        if len(mine) >= self.settings.streams_per_token or disk >= self.settings.disk_per_token:
            reason = f"this token has {len(mine)} streams with {disk} bytes on disk (streams_per_token, disk_per_token)"
            raise Overloaded(429, f"{reason}; delete some", 60)

    def cancel(self, job: Job) -> bool:
        """Drop a job that has not started; return whether that was possible."""
        with self._lock:
            dropped = job.future.cancel()
        self.metrics.cancelled.inc(dropped)
        return dropped

    def _forget_if_unused(self, stream: Stream) -> None:
        """Drop a stream that was deleted, or whose first request was refused or cancelled."""
        if stream.seq == 0 and not self.admitted(stream) and not stream.running:
            self._streams.pop(stream.id, None)
            for live in self.models:
                if live.stream is stream:
                    live.release()

    # Turns.

    def _waiting(self) -> list[Job]:
        return [job for job in self._jobs if not job.future.running() and not job.future.done()]

    def _offer_turn(self) -> None:
        with suppress(RuntimeError):  # the threads have been told to end
            turn = self._threads.submit(self._take_turn)
            self._turns.add(turn)
            turn.add_done_callback(self._turns.discard)

    def _take_turn(self) -> None:
        """Run a few jobs of a stream: of the tenant whose last turn is longest ago, the one that waits longest."""
        with self._lock:
            ready = [job for job in self._waiting() if not job.stream.running]
            if not ready:  # another thread had the job, or will offer a turn when it is done with the stream
                return
            first = min(ready, key=lambda job: self._turn.get(job.tenant, 0))
            self._turn[first.tenant] = max(self._turn.values()) + 1
            stream = first.stream
            stream.running = True
        CURRENT.set(stream.id)
        held = any(self._run_next(stream) for _ in range(_BURST))
        CURRENT.set(None)
        if not held:
            self._free(stream)
        try:
            self._spill()
        except Exception:
            _log.exception("moving streams to disk")

    def _run_next(self, stream: Stream) -> bool:
        """Run the next job of a stream, if there is one; return whether nobody may use the stream after it."""
        with self._lock:
            waiting = self._waiting()
            job = next((job for job in waiting if job.stream is stream), None)
            if job is None:
                return False
            job.future.set_running_or_notify_cancel()
        # The adaptation is optional if it exceeds the budget of the longest waiting request.
        oldest = min((other.enqueued for other in waiting if other is not job), default=math.inf)
        job.busy = time.monotonic() - oldest + self.step_seconds > self.settings.latency_budget
        stream.used = time.time()
        try:
            job.act(self._acquire(stream), job)
        except Exception as error:
            if not isinstance(error, (DplError, OSError)):
                _log.exception("request %s", job.request_id)
                self.metrics.failures.inc()
            stream.event("failed", request_id=job.request_id, reason=f"{type(error).__name__}: {error}")
            if not job.future.done():
                job.future.set_exception(error)
        return job.holds

    def _free(self, stream: Stream) -> None:
        """Let other threads run the stream again."""
        with self._lock:
            stream.running = False
            if self._waiting():
                self._offer_turn()
            self._forget_if_unused(stream)

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
        while not self.writer.problem and (stream := self._reserve_surplus()) is not None:
            try:
                with suppress(OSError, TimeoutError):
                    if (written := self._save(stream)) is not None:
                        written.result(_SPILL_SECONDS)
                if stream.changed > stream.saved:
                    return
                stream.unload()
                self.metrics.spills.inc()
            finally:
                self._free(stream)

    def _reserve_surplus(self) -> Stream | None:
        """Mark the least recently used idle stream as running, if too many are in memory."""
        with self._lock:
            held = self._in_memory()
            idle = [stream for stream in held if not stream.running and not self.admitted(stream)]
            if len(held) <= self.settings.max_streams_in_memory or not idle:
                return None
            stream = min(idle, key=lambda stream: stream.used)
            stream.running = True
            return stream

    def _save(self, stream: Stream) -> "Future[None] | None":
        """Take a stream off its live model, and let it be written if it has changed; no other thread may use it."""
        for live in self.models:
            if live.stream is stream:
                live.unload()
        if stream.changed <= stream.saved or stream.difference is None:
            return None
        return self.writer.save(stream, stream.as_snapshot("auto", stream.difference))

    # The end.

    @property
    def is_idle(self) -> bool:
        """Whether no thread runs a job, or will."""
        return not self._turns

    def begin_stop(self) -> None:
        """Accept no more requests; the time that a stop may take begins."""
        self.accepting = False
        self._stop_by = min(self._stop_by, time.monotonic() + _STOP_SHARE * self.settings.stop_seconds)

    def close(self) -> None:
        """Finish the queued jobs, write every stream to disk, end the threads; all in the time that is left.

        A job that hangs gets half of that time. Its stream keeps its last snapshot; every other stream is written.
        """
        self.begin_stop()
        half = self._seconds_left() / 2
        while (turns := self._turns.copy()) and self._seconds_left() > half:
            wait(turns, self._seconds_left() - half)
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._save_idle()
        if self.writer.stop(self._seconds_left()):
            self.store.close()
        unsaved = [stream.id for stream in self.streams() if stream.changed > stream.saved]
        if unsaved:
            seconds = self.settings.stop_seconds
            _log.error("stopped after %.0f s; not on disk: the last batches of %s", seconds, ", ".join(unsaved[:20]))
        else:
            _log.info("stopped; every stream is on disk")
        self.decoders.close()

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
