"""Where streams live: a few on live models, more in memory as deltas, the rest on disk."""

import threading
import time
from collections import OrderedDict
from collections.abc import Callable

from dpl.model.adaptive import AdaptiveModel
from dpl.serve.session import Context, Session, Slot
from dpl.serve.stream import Stream

__all__ = ["Residence"]


class Residence:
    """Moves streams between the three places. A stream is moved only while it counts as running: one thread has it."""

    def __init__(
        self,
        models: list[AdaptiveModel],
        context: Context,
        lock: threading.Condition,
        free: Callable[[Stream], None],
    ) -> None:
        self.context = context
        self._changed, self._free = lock, free
        self._memory: OrderedDict[str, Stream] = OrderedDict()  # least recently used first
        self._slots = [Slot(model) for model in models]

    @property
    def held(self) -> int:
        """The number of streams in memory."""
        return len(self._memory)

    @property
    def size(self) -> int:
        """The bytes of what they have learned."""
        return sum(stream.delta.size for stream in self._memory.values() if stream.delta is not None)

    def release(self, session: Session | None) -> None:
        """Let others use the live model; the stream stays on it until another one needs it."""
        if session is not None:
            with self._changed:
                session.slot.busy = False

    def forget(self, stream: Stream) -> None:
        """Drop a stream that is no more."""
        self._memory.pop(stream.id, None)
        for slot in self._slots:
            if slot.stream is stream:
                slot.stream = None

    def save_all(self) -> None:
        """Put every stream on the disk; only after all threads have ended."""
        for slot in self._slots:
            if slot.stream is not None:
                Session(slot.stream, slot, self.context).leave()
        for stream in self._memory.values():
            self._save_unsaved(stream)

    def bring(self, stream: Stream) -> Session:
        """Put the stream on a live model: its own if it still has one, else the one used least recently."""
        with self._changed:
            free = [slot for slot in self._slots if not slot.busy]
            slot = next((s for s in free if s.stream is stream), None) or min(free, key=lambda s: s.used)
            slot.busy, slot.used = True, time.monotonic()
            tenant = slot.stream if slot.stream is not stream else None
            if tenant is not None:
                tenant.running = True  # nobody may touch it while it is moved
        session = Session(stream, slot, self.context)
        try:
            self._evict(tenant, slot)
            session.enter()
        except Exception:
            with self._changed:
                slot.busy = False
            raise
        with self._changed:
            self._memory[stream.id] = stream
            self._memory.move_to_end(stream.id)
        return session

    def _evict(self, tenant: Stream | None, slot: Slot) -> None:
        """Take another stream off a live model; it stays in memory."""
        if tenant is not None:
            try:
                Session(tenant, slot, self.context).leave()
            finally:
                self._free(tenant)

    def shrink(self) -> None:
        """Put the least recently used streams to disk until few enough are in memory."""
        while (stream := self._take_one_too_many()) is not None:
            try:
                self._vacate(stream)
                if not self._save_unsaved(stream):
                    return
                with self._changed:
                    self._memory.pop(stream.id, None)
                stream.sleep()
                self.context.metrics.spills.inc()
            finally:
                self._free(stream)

    def _take_one_too_many(self) -> Stream | None:
        with self._changed:
            if len(self._memory) <= self.context.settings.max_streams_in_memory:
                return None
            stream = next((s for s in self._memory.values() if not s.running and not s.admitted), None)
            if stream is not None:
                stream.running = True
            return stream

    def _vacate(self, stream: Stream) -> None:
        with self._changed:
            slot = next((s for s in self._slots if s.stream is stream), None)
            if slot is not None:
                slot.busy = True
        if slot is not None:
            Session(stream, slot, self.context).leave()
            with self._changed:
                slot.busy = False

    def _save_unsaved(self, stream: Stream) -> bool:
        """Put a stream that is on no live model to disk if it is not; return whether it is there now."""
        if stream.changed <= stream.saved or stream.delta is None:
            return True
        try:
            self.context.writer.save_now(stream, stream.as_saved("auto", stream.delta))
        except OSError:
            return False
        return True
