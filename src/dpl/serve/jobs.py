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
from dpl.serve.store import SnapshotName, StreamSnapshot

__all__ = ["RUN", "AdaptChoice", "Delete", "Job", "Predict", "Reset", "Rollback", "Snapshot", "describe_snapshot"]

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
        stream, first = session.stream, session.context.first and self.adapt != "wait"
        stream.advance()
        stream.images += len(self.images)
        skip = self._reason_to_skip(session, busy)
        if skip is not None:
            self._respond(session, session.predict(self.images), {"status": skip[0], "reason": skip[1]})
            self._note(session, skip[0], reason=skip[1])
        elif first:
            answer, durable = session.predict(self.images), min(stream.durable_through, stream.seq - 1)
            self._respond(session, answer, {"status": "scheduled", "reason": None}, durable_through=durable)
            self._step(session)
        else:
            answer = self._step(session)
            self._respond(session, answer, {"status": "done", "reason": None, **answer.facts})

    def _reason_to_skip(self, session: Session, busy: bool) -> tuple[str, str] | None:
        if self.adapt == "off":
            return "off", "the request has adapt=off"
        if busy and self.adapt != "wait":
            return "skipped", "requests are waiting longer than the latency budget"
        if session.context.writer.problem and session.context.settings.on_storage_failure == "stop":
            return "skipped", "the state folder cannot be written"
        return None

    def _step(self, session: Session) -> BatchAnswer:
        answer = session.step(self.images)
        self._note(session, "adapted", updated=bool(answer.facts.get("updated", True)))
        session.save_if_due()
        return answer

    def _note(self, session: Session, result: str, **facts: Any) -> None:
        stream = session.stream
        stream.skipped += result == "skipped"
        stream.event("predict", request_id=self.request_id, adaptation=result, images=len(self.images), **facts)
        label = result if result != "adapted" else "updated" if facts["updated"] else "no_update"
        session.context.metrics.adaptations.labels(label).inc()

    def _respond(self, session: Session, answer: BatchAnswer, adaptation: dict[str, Any], **facts: Any) -> None:
        probabilities, errors = answer.logits.softmax(dim=1), answer.errors()
        good = [row for row in range(len(probabilities)) if row not in errors]
        if good:
            confidence, classes = probabilities[good].max(dim=1)
            session.stream.note_predictions(confidence.mean().item(), classes.tolist())
        session.context.metrics.images.inc(len(good))
        predictions = self._predictions(probabilities, session.context.names)
        for row, reason in errors.items():
            predictions[row] = {"class": None, "name": None, "confidence": None, "error": reason}
        self._finish(session, predictions=predictions, adaptation=adaptation, guard=session.stream.guard, **facts)

    def _predictions(self, probabilities: Tensor, names: Sequence[str]) -> list[dict[str, Any]]:
        top = torch.topk(probabilities, min(self.top, probabilities.shape[1]), dim=1)
        predictions = []
        for i, (values, labels) in enumerate(zip(top.values.tolist(), top.indices.tolist(), strict=True)):
            ranked = [
                {"class": label, "name": names[label] if label < len(names) else None, "confidence": value}
                for value, label in zip(values, labels, strict=True)
            ]
            prediction: dict[str, Any] = {**ranked[0]}
            if self.top > 1:
                prediction["top"] = ranked
            if self.probabilities:
                prediction["probabilities"] = probabilities[i].tolist()
            predictions.append(prediction)
        return predictions


@dataclass(eq=False)
class Snapshot(Job):
    """Write a manual snapshot, which is kept until newer manual ones replace it."""

    needs_disk = True

    def run(self, session: Session, busy: bool) -> None:
        """Take the snapshot; it is written in the background."""
        session.stream.advance()
        self.written = session.save("manual")
        size = session.current_difference().size
        name = SnapshotName(session.stream.seq, session.stream.version, "manual")
        self._finish(session, snapshot={**describe_snapshot(name), "bytes": size})


@dataclass(eq=False)
class Rollback(Job):
    """Return to a snapshot: the newest one of an earlier state, or the one with the given number."""

    to: int | None = None

    def run(self, session: Session, busy: bool) -> None:
        """Restore the snapshot, then save the restored state."""
        stream = session.stream
        snapshot = self._restored(session)
        stream.changed = stream.advance()
        stream.event("rollback", request_id=self.request_id, to=snapshot.name.seq, version=snapshot.name.version)
        self.written = session.save("auto")
        self._finish(session, restored={**describe_snapshot(snapshot.name), "bytes": snapshot.difference.size})

    def _restored(self, session: Session) -> StreamSnapshot:
        store, stream = session.context.store, session.stream
        if self.to is not None:
            names = store.names(stream.id)
            chosen = next((name for name in names if name.seq == self.to), None)
            if chosen is None:
                raise SnapshotError(f"no snapshot {self.to}; there are {[name.seq for name in names] or 'none'}")
            session.restore(snapshot := store.read(stream.id, chosen))
            return snapshot
        newest, problems = session.restore_newest(before=stream.version)
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

    def run(self, session: Session, busy: bool) -> None:
        """Take the stream off the model; if its folder cannot be deleted, the stream is unchanged."""
        session.unload()
        self.written = session.context.writer.delete(session.stream)
        self._finish(session, deleted=True)


def describe_snapshot(name: SnapshotName) -> dict[str, Any]:
    """Return a snapshot's name as it is shown in responses."""
    return {"seq": name.seq, "version": name.version, "kind": name.kind}
