"""The jobs of a stream: predict, snapshot, rollback, reset, delete.

Each job runs alone on its stream and gives its response through a future.
"""

import time
import uuid
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from dpl.core.errors import SnapshotError
from dpl.serve.session import BatchAnswer, Session
from dpl.serve.store import StreamSnapshot

__all__ = ["RUN", "AdaptChoice", "Delete", "Job", "Predict", "Reset", "Rollback", "Snapshot"]

AdaptChoice = Literal["auto", "wait", "off"]
RUN = uuid.uuid4().hex[:12]  # another one after a restart, when numbers of jobs may be used again


@dataclass(eq=False)
class Job:
    """Something to do with one stream."""

    request_id: str
    future: "Future[dict[str, Any]]" = field(default_factory=Future, kw_only=True)
    enqueued: float = field(default_factory=time.monotonic, kw_only=True)
    written: "Future[None] | None" = field(default=None, kw_only=True)  # what the response waits for
    needs_disk: ClassVar[bool] = False  # whether it fails if that cannot be written

    def run(self, session: Session, busy: bool) -> None:
        """Do the job and set the future's result; if `busy`, requests wait and optional work is skipped."""
        raise NotImplementedError

    def _finish(self, session: Session, **facts: Any) -> None:
        stream = session.stream
        self.future.set_result({
            "request_id": self.request_id,
            "stream": stream.id,
            "seq": stream.seq,
            "run": RUN,
            "durable_through": stream.durable_through,
            "snapshot_every": session.context.settings.snapshot_every,
            **facts,
        })  # fmt: skip


@dataclass(eq=False)
class Predict(Job):
    """Predict a batch and adapt to it: after the response if the method allows that, otherwise before it."""

    images: Tensor
    adapt: AdaptChoice = "auto"
    top: int = 1
    probabilities: bool = False

    def run(self, session: Session, busy: bool) -> None:
        """Predict, respond, adapt."""
        stream = session.stream
        stream.advance()
        stream.images += len(self.images)
        status, reason = self._plan(session, busy)
        if status in ("off", "skipped"):
            self._respond(session, session.predict(self.images), {"status": status, "reason": reason})
            stream.skipped += status == "skipped"
            self._note(session, status, adaptation=status, reason=reason)
        elif status == "scheduled":
            answer, durable = session.predict(self.images), min(stream.durable_through, stream.seq - 1)
            self._respond(session, answer, {"status": status, "reason": None}, durable_through=durable)
            self._step(session)
        else:
            answer = self._step(session)
            self._respond(session, answer, {"status": status, "reason": None, **answer.facts})

    def _plan(self, session: Session, busy: bool) -> tuple[str, str | None]:
        """Return what the response says about the adaptation, and why there is none."""
        if self.adapt == "off":
            return "off", "the request has adapt=off"
        if busy and self.adapt != "wait":
            return "skipped", "requests are waiting longer than the latency budget"
        if session.context.writer.problem and session.context.settings.on_storage_failure == "stop":
            return "skipped", "the state folder cannot be written"
        return "scheduled" if session.context.first and self.adapt != "wait" else "done", None

    def _step(self, session: Session) -> BatchAnswer:
        answer = session.step(self.images)
        updated = bool(answer.facts.get("updated", True))
        self._note(session, "updated" if updated else "no_update", adaptation="adapted", updated=updated)
        session.save_if_due()
        return answer

    def _note(self, session: Session, result: str, **facts: Any) -> None:
        session.stream.event("predict", request_id=self.request_id, images=len(self.images), **facts)
        session.context.metrics.adaptations.labels(result).inc()

    def _respond(self, session: Session, answer: BatchAnswer, adaptation: dict[str, Any], **facts: Any) -> None:
        probabilities = answer.logits.softmax(dim=1)
        good = [row for row in range(len(probabilities)) if row not in answer.errors]
        if good:
            confidence, classes = probabilities[good].max(dim=1)
            session.stream.confidence.append(confidence.mean().item())
            session.stream.classes.extend(classes.tolist())
        session.context.metrics.images.inc(len(good))
        predictions = self._predictions(probabilities, session.context.names)
        for row, reason in answer.errors.items():
            predictions[row] = {"class": None, "name": None, "confidence": None, "error": reason}
        self._finish(session, predictions=predictions, adaptation=adaptation, guard=session.stream.guard, **facts)

    def _predictions(self, probabilities: Tensor, names: Sequence[str]) -> list[dict[str, Any]]:
        top = torch.topk(probabilities, min(self.top, probabilities.shape[1]), dim=1)
        predictions = []
        for row, values, labels in zip(probabilities, top.values.tolist(), top.indices.tolist(), strict=True):
            ranked = [
                {"class": label, "name": names[label] if label < len(names) else None, "confidence": value}
                for value, label in zip(values, labels, strict=True)
            ]
            more = {"top": ranked} if self.top > 1 else {}
            predictions.append(ranked[0] | more | ({"probabilities": row.tolist()} if self.probabilities else {}))
        return predictions


@dataclass(eq=False)
class Snapshot(Job):
    """Write a manual snapshot, which is kept until newer manual ones replace it."""

    needs_disk = True

    def run(self, session: Session, busy: bool) -> None:
        """Take the snapshot; it is written in the background."""
        session.stream.advance()
        self.written = session.save("manual")
        taken = session.stream.as_snapshot("manual", session.current_difference())
        self._finish(session, snapshot=taken.describe())


@dataclass(eq=False)
class Rollback(Job):
    """Return to a snapshot: the newest one of an earlier state, or the one with the given number."""

    to: int | None = None

    def run(self, session: Session, busy: bool) -> None:
        """Restore the snapshot, then save the restored state."""
        stream, snapshot = session.stream, self._restored(session)
        stream.changed = stream.advance()
        stream.event("rollback", request_id=self.request_id, to=snapshot.name.seq, version=snapshot.name.version)
        self.written = session.save("auto")
        self._finish(session, restored=snapshot.describe())

    def _restored(self, session: Session) -> StreamSnapshot:
        store, stream = session.context.store, session.stream
        if self.to is not None:
            names = store.names(stream.id)
            chosen = next((name for name in names if name.seq == self.to), None)
            if chosen is None:
                raise SnapshotError(f"no snapshot {self.to}; there are {[name.seq for name in names] or 'none'}")
            session.restore(snapshot := store.read(stream.id, chosen))
            return snapshot
        newest, problems = store.newest(stream.id, before=stream.version, use=session.restore)
        if newest is None:
            reason = f" ({problems[0]})" if problems else ""
            raise SnapshotError(f"no snapshot of an earlier state than version {stream.version}{reason}; try reset")
        return newest


@dataclass(eq=False)
class Reset(Job):
    """Return to the source model, exactly."""

    def run(self, session: Session, busy: bool) -> None:
        """Reset, then save the state."""
        session.stream.advance()
        session.reset()
        session.stream.event("reset", request_id=self.request_id)
        self.written = session.save("auto")
        self._finish(session)


@dataclass(eq=False)
class Delete(Job):
    """Delete the stream, in memory and on disk."""

    needs_disk = True
    deleted: "Future[None] | None" = None  # the folder is gone; `written` follows when the stream is forgotten, too

    def run(self, session: Session, busy: bool) -> None:
        """Take the stream off the model; if its folder cannot be deleted, the stream is unchanged."""
        session.unload()
        self.deleted, self.written = session.context.writer.delete(session.stream), Future()
        self._finish(session, deleted=True)
