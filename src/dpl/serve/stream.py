"""One stream: what was done with it, what it has learned, and how it goes. Small, also for thousands of them."""

import json
import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from dpl.serve.delta import Delta
from dpl.serve.store import Kind, Saved, SavedName

if TYPE_CHECKING:
    from dpl.serve.jobs import Job

__all__ = ["Stream"]

_RECENT_BATCHES = 120
_RECENT_IMAGES = 500
_KEPT_ASLEEP = 16  # events remembered of a stream that lies on disk
_SHOWN_CLASSES = 10
_journal = logging.getLogger("dpl.serve.journal")  # every event of every stream, one JSON document a line
_journal.setLevel(logging.INFO)
_journal.propagate = False


class Stream:
    """The record of a stream. Its state (`seq` to `stale`) is changed only by the one thread that runs its jobs."""

    def __init__(self, stream_id: str, history: int) -> None:
        self.id = stream_id
        self.seq = 0  # number of the last thing done
        self.version = 0  # seq at which the present state came to be; 0 is the source
        self.changed = 0  # seq of the last change of the state
        self.saved = 0  # seq of the newest snapshot on disk
        self.adapted = 0  # batches on which adaptation ran
        self.updates = 0  # those among them that changed a parameter (since the process started)
        self.images = 0
        self.captured = 0  # value of `adapted` when the last snapshot was asked for
        self.durable = 0  # value of `adapted` in the newest snapshot on disk
        self.delta: Delta | None = None  # None: on disk, or never used
        self.unread = False  # of an earlier run: what it has seen is known to the disk alone
        self.stale = False  # the live model has moved on from `delta`
        self.drift = 0.0
        self.skipped = 0
        self.used = time.time()
        self.jobs: deque[Job] = deque()
        self.running = False
        self.admitted = 0
        self.last: dict[str, Any] = {}  # what the last adaptation did
        self.guard: dict[str, Any] = {}  # what the guard did with that batch, and in all
        self._lock = threading.Lock()
        self._events: deque[dict[str, Any]] = deque(maxlen=history)
        self._confidence: deque[float] = deque(maxlen=_RECENT_BATCHES)
        self._classes: deque[int] = deque(maxlen=_RECENT_IMAGES)

    @property
    def durable_through(self) -> int:
        """The highest seq up to which a crash loses nothing that was learned."""
        return self.seq if self.changed <= self.saved else self.saved

    @property
    def unsaved(self) -> int:
        """Adapted batches that a crash would lose."""
        return self.adapted - self.durable if self.changed > self.saved else 0

    @property
    def confidence(self) -> float | None:
        """Mean confidence of the last batch."""
        with self._lock:
            return self._confidence[-1] if self._confidence else None

    def advance(self) -> int:
        """Count one more thing done."""
        self.seq += 1
        self.used = time.time()
        return self.seq

    def note_change(self, version: int | None = None) -> None:
        """Note that the state has changed: adapted further, or set to an older version."""
        self.changed = self.seq
        self.version = self.seq if version is None else version
        self.stale = True

    def take_over(self, saved: Saved) -> None:
        """Become what a snapshot holds, after it was read from disk."""
        self.seq = max(self.seq, saved.name.seq)
        self.version, self.changed, self.saved = saved.name.version, saved.name.seq, saved.name.seq
        if self.unread:
            self.adapted = self.images = 0  # what was read ahead may be of a snapshot that turned out damaged
        self.adapted, self.images = max(self.adapted, saved.adapted), max(self.images, saved.images)
        self.captured = self.durable = self.adapted
        self.delta, self.stale, self.unread = saved.delta, False, False

    def note_saved(self, saved: Saved) -> None:
        """Note that a snapshot is on the disk."""
        self.saved = max(self.saved, saved.name.seq)
        self.durable = max(self.durable, saved.adapted)
        self.event("snapshot", snapshot=saved.name.seq, version=saved.name.version, kind=saved.name.kind)

    def forget(self) -> None:
        """Become a new stream, after the old one was deleted."""
        self.seq = self.version = self.changed = self.saved = 0
        self.adapted = self.images = self.updates = self.skipped = self.captured = self.durable = 0
        self.last, self.guard, self.drift = {}, {}, 0.0
        with self._lock:
            self._events.clear()
            self._confidence.clear()
            self._classes.clear()

    def as_saved(self, kind: Kind, delta: Delta) -> Saved:
        """Return the present state as a snapshot."""
        return Saved(SavedName(self.seq, self.version, kind), delta, self.adapted, self.images)

    def watch(self, confidence: float, classes: Iterable[int]) -> None:
        """Remember how sure a batch was and what it saw."""
        with self._lock:
            self._confidence.append(confidence)
            self._classes.extend(classes)

    def event(self, what: str, /, **facts: Any) -> None:
        """Remember that something happened."""
        entry = {"seq": self.seq, "time": _now(), "event": what, **facts}
        with self._lock:
            self._events.append(entry)
        if _journal.hasHandlers():
            _journal.info("%s", json.dumps({"stream": self.id, **entry}))

    def events(self, after: int = 0) -> list[dict[str, Any]]:
        """Return what happened since `after`, the oldest first."""
        with self._lock:
            return [entry for entry in self._events if entry["seq"] > after]

    def sleep(self) -> None:
        """Forget what is on disk and most of the history."""
        self.delta, self.stale = None, False
        with self._lock:
            recent = list(self._events)[-_KEPT_ASLEEP:]
            self._events.clear()
            self._events.extend(recent)
            self._classes.clear()

    def describe(self, names: Sequence[str], every: int) -> dict[str, Any]:
        """Return the stream's status as plain data."""
        with self._lock:
            confidence, classes = list(self._confidence), Counter(self._classes)
        total = sum(classes.values())
        return {
            "stream": self.id,
            "seq": self.seq,
            "version": self.version,
            "durable_through": self.durable_through,
            "snapshot_every": every,
            "unsaved_batches": self.unsaved,
            "images": self.images,
            "adapted_batches": self.adapted,
            "updates": self.updates,
            "skipped_batches": self.skipped,
            "in_memory": self.delta is not None,
            "waiting": self.admitted,
            "last_used": datetime.fromtimestamp(self.used, UTC).isoformat(timespec="milliseconds"),
            "confidence": confidence[-1] if confidence else None,
            "recent_confidence": confidence,
            "distinct_classes": len(classes),
            "class_balance": [
                {"class": label, "name": names[label] if label < len(names) else None, "share": count / total}
                for label, count in classes.most_common(_SHOWN_CLASSES)
            ],
            "drift": self.drift,
            "last_adaptation": self.last,
            "guard": self.guard,
        }


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")
