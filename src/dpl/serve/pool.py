"""Which streams are on a live model, which in memory, which on disk."""

import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager, suppress

from dpl.model.adaptive import AdaptiveModel
from dpl.serve.session import LiveModel, ServerContext, Session
from dpl.serve.stream import Stream

__all__ = ["ModelPool"]

_SPILL_SECONDS = 0.25  # a worker waits this long for the disk, below what a person or a camera notices


class ModelPool:
    """Keeps a few streams on live models, more in memory as differences, and the rest on disk.

    A stream is moved only while it counts as running, so that one thread at a time touches it. `streams` and `lock`
    are the engine's; `free` lets other threads run a stream again.
    """

    def __init__(
        self,
        models: list[AdaptiveModel],
        context: ServerContext,
        streams: dict[str, Stream],
        lock: AbstractContextManager[object],
        free: Callable[[Stream], None],
    ) -> None:
        self.models = [LiveModel(model) for model in models]
        self._context, self._streams, self._lock, self._free = context, streams, lock, free

    def in_memory(self) -> list[Stream]:
        """Return the streams whose state is in memory; the caller holds the lock."""
        return [stream for stream in self._streams.values() if stream.difference is not None]

    def acquire(self, stream: Stream) -> Session:
        """Put the stream on a live model: the one it is still on, or the one used least recently."""
        with self._lock:
            idle = [live for live in self.models if not live.busy]
            live = next((m for m in idle if m.stream is stream), None) or min(
                (m for m in idle if m.stream is None or not m.stream.running),  # else another thread has that stream
                key=lambda m: m.used,
            )
            live.busy, live.used = True, time.monotonic()
            evicted = live.stream if live.stream is not stream else None
            if evicted is not None:
                evicted.running = True
        session = Session(stream, live, self._context)
        try:
            if evicted is not None:
                Session(evicted, live, self._context).unload()
            session.load()
        except Exception:
            live.busy = False
            raise
        finally:
            if evicted is not None:
                self._free(evicted)
        return session

    def spill(self) -> None:
        """Drop the least recently used streams from memory until few enough are there; write them first.

        Nobody waits long for that: a stream that is not on disk yet stays in memory, and is dropped another time.
        """
        while not self._context.writer.problem and (stream := self._reserve_surplus()) is not None:
            try:
                with suppress(OSError, TimeoutError):
                    self.save(stream).result(_SPILL_SECONDS)
                if stream.changed > stream.saved:
                    return
                stream.unload()
                self._context.metrics.spills.inc()
            finally:
                self._free(stream)

    def _reserve_surplus(self) -> Stream | None:
        """Mark the least recently used idle stream as running, if too many are in memory."""
        with self._lock:
            held = self.in_memory()
            idle = [stream for stream in held if not stream.running and not stream.admitted]
            if len(held) <= self._context.settings.max_streams_in_memory or not idle:
                return None
            stream = min(idle, key=lambda stream: stream.used)
            stream.running = True
            return stream

    def save(self, stream: Stream) -> "Future[None]":
        """Take a stream off its live model, and let it be written if it has changed; no other thread may use it."""
        with self._lock:
            live = next((live for live in self.models if live.stream is stream), None)
            if live is not None:
                live.busy = True
        if live is not None:
            try:
                Session(stream, live, self._context).unload()
            finally:
                live.busy = False
        if stream.changed > stream.saved and stream.difference is not None:
            return self._context.writer.save(stream, stream.as_snapshot("auto", stream.difference))
        saved: Future[None] = Future()
        saved.set_result(None)
        return saved

    def forget(self, stream: Stream) -> None:
        """Drop a deleted stream."""
        for live in self.models:
            if live.stream is stream:
                live.stream = None
