"""The record of one stream: counts, adapted state, recent events. It is small, because there may be thousands."""

import json
import logging
import time
from collections import Counter, deque
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from dpl.serve.store import Difference, StreamSnapshot

if TYPE_CHECKING:
    from dpl.serve.server import Server

__all__ = ["Stream"]

_RECENT_BATCHES = 120
_RECENT_IMAGES = 500
_EVENTS = 256
_EVENTS_ON_DISK = 16  # events kept of a stream whose state is on disk only
_SHOWN_CLASSES = 10
_LOGGED = {"reset", "rollback", "recovered", "snapshot_refused", "started_over"}
_STATUS = (
    "seq", "version", "durable_through", "images", "adapted_batches", "skipped_batches", "drift", "last_adaptation",
    "guard", "estimate",
)  # fmt: skip
_log = logging.getLogger("dpl.serve")
_journal = logging.getLogger("dpl.serve.journal")  # every event of every stream, one JSON document per line
_journal.setLevel(logging.INFO)
_journal.propagate = False


class Stream:
    """A stream. Only the one thread that runs its jobs changes the attributes from `seq` to `estimate`."""

    def __init__(self, stream_id: str) -> None:
        self.id = stream_id
        self.seq = 0  # number of the last job
        self.version = 0  # seq at which the present state was reached; 0 is the source model
        self.changed = 0  # seq of the last change of the state
        self.saved = 0  # seq of the newest snapshot on disk
        self.adapted_batches = 0  # those that changed a parameter
        self.images = 0
        self.steps = 0  # batches shown to the method since the process started; each may have changed the state
        self.captured = 0  # value of `steps` when the last snapshot was taken
        self.durable = 0  # value of `steps` in the newest snapshot on disk
        self.skipped_batches = 0
        self.difference: Difference | None = None  # None: on disk only, or never used
        self.stale = False  # the live model has changed since `difference` was taken
        self.refused = False  # no snapshot could be read, so that the stream started over
        self.drift = 0.0
        self.last_adaptation: dict[str, Any] = {}
        self.guard: dict[str, Any] = {}  # what the guard did with that batch, and in all
        self.estimate: dict[str, Any] | None = None  # of the accuracy after that batch, where the stream is watched
        self.disk = 0  # bytes of the snapshots on disk
        self.used = time.time()
        self.running = False
        self.confidence: deque[float] = deque(maxlen=_RECENT_BATCHES)  # mean of each batch
        self.classes: deque[int] = deque(maxlen=_RECENT_IMAGES)
        self.events: deque[dict[str, Any]] = deque(maxlen=_EVENTS)  # other threads read a copy

    @property
    def durable_through(self) -> int:
        """The highest seq up to which a crash loses no adaptation."""
        return self.seq if self.changed <= self.saved else self.saved

    def note_change(self, version: int | None = None) -> None:
        """Note that the state has changed: by adaptation, or by a return to an older version."""
        self.changed = self.seq
        self.version = self.seq if version is None else version
        self.stale = True

    def apply_snapshot(self, snapshot: StreamSnapshot) -> None:
        """Take over the state and the counts of a snapshot that was read from disk."""
        self.seq = max(self.seq, snapshot.seq)
        self.version, self.changed, self.saved = snapshot.version, snapshot.seq, snapshot.seq
        self.adapted_batches, self.images = snapshot.adapted, max(self.images, snapshot.images)  # not all adapt
        self.captured = self.durable = self.steps
        self.difference, self.stale = snapshot.difference, False

    def as_snapshot(self, kind: str, difference: Difference) -> StreamSnapshot:
        """Return the present state as a snapshot."""
        self.captured = self.steps
        return StreamSnapshot(self.seq, self.version, kind, difference, self.adapted_batches, self.images, self.steps)

    def note_snapshot(self, snapshot: StreamSnapshot) -> None:
        """Note that a snapshot is on disk."""
        self.saved = max(self.saved, snapshot.seq)
        self.durable = max(self.durable, snapshot.steps)
        self.event("snapshot", snapshot=snapshot.seq, version=snapshot.version, kind=snapshot.kind)

    def forget(self) -> None:
        """Return to the values of a new stream, after this one was deleted."""
        vars(self).update(vars(Stream(self.id)), running=self.running)

    def event(self, what: str, /, **facts: Any) -> None:
        """Record an event."""
        entry = {"seq": self.seq, "time": _shown(time.time()), "event": what, **facts}
        self.events.append(entry)
        if what in _LOGGED:
            details = "".join(f", {name}: {value}" for name, value in facts.items())
            _log.info("%s%s", what, details, extra={"stream": self.id})
        if _journal.hasHandlers():
            _journal.info("%s", json.dumps({"stream": self.id, **entry}))

    def unload(self) -> None:
        """Free the memory of the state, which is on disk, and of most events."""
        self.difference, self.stale = None, False
        self.events = deque(list(self.events)[-_EVENTS_ON_DISK:], _EVENTS)
        self.classes.clear()

    def describe(self, server: "Server") -> dict[str, Any]:
        """Return the stream's status as plain data."""
        confidence, classes = list(self.confidence), Counter(self.classes.copy())
        return {
            "stream": self.id,
            **{name: getattr(self, name) for name in _STATUS},
            "unsaved_batches": self.steps - self.durable if self.changed > self.saved else 0,
            "in_memory": self.difference is not None,
            "waiting": server.admitted(self),
            "last_used": _shown(self.used),
            "confidence": confidence[-1] if confidence else None,
            "recent_confidence": confidence,
            "distinct_classes": len(classes),
            "class_balance": [
                {"class": label, "name": server.names[label], "share": count / classes.total()}
                for label, count in classes.most_common(_SHOWN_CLASSES)
            ],
        }


def _shown(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds")
