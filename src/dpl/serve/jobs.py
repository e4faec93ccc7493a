"""What can be done with a stream. Each job runs alone on its stream and gives its answer through a future."""

import time
import uuid
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from dpl.core.errors import SnapshotError
from dpl.serve.session import Seen, Session
from dpl.serve.store import Saved

__all__ = ["AdaptChoice", "Delete", "Job", "NoSnapshot", "Predict", "Reset", "Rollback", "Snapshot"]

AdaptChoice = Literal["auto", "wait", "off"]
RUN = uuid.uuid4().hex[:12]  # tells the numbers of this process from those before a restart


class NoSnapshot(SnapshotError):  # noqa: N818 - the state of a stream, not of the program
    """There is no such snapshot to roll back to."""


@dataclass(eq=False)
class Job:
    """One thing to do with one stream."""

    request_id: str
    answer: "Future[dict[str, Any]]" = field(default_factory=Future, kw_only=True)
    enqueued: float = field(default_factory=time.monotonic, kw_only=True)

    def run(self, session: Session, busy: bool) -> None:
        """Do it; must set the answer's result. `busy`: requests wait, so leave out what can be left out."""
        raise NotImplementedError

    def _finish(self, session: Session, **facts: Any) -> None:
        stream = session.stream
        self.answer.set_result({
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
    """Predict a batch and adapt to it: after the answer where the method allows, before it where it must."""

    images: Tensor
    adapt: AdaptChoice = "auto"
    top: int = 1
    probabilities: bool = False

    def run(self, session: Session, busy: bool) -> None:
        """Predict, answer, adapt."""
        stream, first = session.stream, session.context.first and self.adapt != "wait"
        stream.advance()
        stream.images += len(self.images)
        skip = self._reason_to_skip(session, busy)
        if skip is not None:
            self._answer(session, session.predict(self.images), {"status": skip[0], "reason": skip[1]})
            self._note(session, skip[0], reason=skip[1])
        elif first:
            seen, durable = session.predict(self.images), min(stream.durable_through, stream.seq - 1)
            self._answer(session, seen, {"status": "scheduled", "reason": None}, durable_through=durable)
            self._step(session)
        else:
            seen = self._step(session)
            self._answer(session, seen, {"status": "done", "reason": None, **seen.facts})

    def _reason_to_skip(self, session: Session, busy: bool) -> tuple[str, str] | None:
        if self.adapt == "off":
            return "off", "the request asked for none"
        if busy and self.adapt != "wait":
            return "skipped", "requests are waiting longer than the latency budget"
        if session.context.writer.problem and session.context.settings.on_storage_failure == "stop":
            return "skipped", "the state folder cannot be written"
        return None

    def _step(self, session: Session) -> Seen:
        seen = session.step(self.images)
        self._note(session, "adapted", updated=bool(seen.facts.get("updated", True)))
        session.save_if_due()
        return seen

    def _note(self, session: Session, result: str, **facts: Any) -> None:
        stream = session.stream
        stream.skipped += result == "skipped"
        stream.event("predict", request_id=self.request_id, adaptation=result, images=len(self.images), **facts)
        label = result if result != "adapted" else "updated" if facts["updated"] else "no_update"
        session.context.metrics.adaptations.labels(label).inc()

    def _answer(self, session: Session, seen: Seen, adaptation: dict[str, Any], **facts: Any) -> None:
        probabilities, errors = seen.logits.softmax(dim=1), seen.errors()
        good = [row for row in range(len(probabilities)) if row not in errors]
        if good:
            confidence, classes = probabilities[good].max(dim=1)
            session.stream.watch(confidence.mean().item(), classes.tolist())
        session.context.metrics.images.inc(len(good))
        rows = self._rows(probabilities, session.context.names)
        for row, reason in errors.items():
            rows[row] = {"class": None, "name": None, "confidence": None, "error": reason}
        self._finish(session, predictions=rows, adaptation=adaptation, guard=session.stream.guard, **facts)

    def _rows(self, probabilities: Tensor, names: Sequence[str]) -> list[dict[str, Any]]:
        top = torch.topk(probabilities, min(self.top, probabilities.shape[1]), dim=1)
        rows = []
        for i, (values, labels) in enumerate(zip(top.values.tolist(), top.indices.tolist(), strict=True)):
            ranked = [
                {"class": label, "name": names[label] if label < len(names) else None, "confidence": value}
                for value, label in zip(values, labels, strict=True)
            ]
            row: dict[str, Any] = {**ranked[0]}
            if self.top > 1:
                row["top"] = ranked
            if self.probabilities:
                row["probabilities"] = probabilities[i].tolist()
            rows.append(row)
        return rows


@dataclass(eq=False)
class Snapshot(Job):
    """Put the stream's state on the disk, to stay until newer manual snapshots push it out."""

    def run(self, session: Session, busy: bool) -> None:
        """Write and answer."""
        session.stream.advance()
        saved = session.save("manual")
        self._finish(session, snapshot=_described(saved))


@dataclass(eq=False)
class Rollback(Job):
    """Return to a snapshot: the newest one of an earlier state, or the one with the given number."""

    to: int | None = None

    def run(self, session: Session, busy: bool) -> None:
        """Find it, load it, make the return itself durable."""
        saved = self._target(session)
        session.stream.advance()
        session.restore(saved)
        session.stream.event("rollback", request_id=self.request_id, to=saved.name.seq, version=saved.name.version)
        self._finish(session, restored=_described(saved), durable=_made_durable(session))

    def _target(self, session: Session) -> Saved:
        store, stream = session.context.store, session.stream
        names = store.names(stream.id)
        if self.to is not None:
            chosen = next((name for name in names if name.seq == self.to), None)
            if chosen is None:
                raise NoSnapshot(f"no snapshot {self.to}; there are {[name.seq for name in names] or 'none'}")
            return store.read(stream.id, chosen)
        saved, problems = store.newest(stream.id, before=stream.version)
        if saved is None:
            reason = f" ({problems[0]})" if problems else ""
            raise NoSnapshot(f"no snapshot of an earlier state than version {stream.version}{reason}; try reset")
        return saved


@dataclass(eq=False)
class Reset(Job):
    """Return to the source model, bit for bit."""

    def run(self, session: Session, busy: bool) -> None:
        """Reset, and make that durable."""
        session.stream.advance()
        session.reset()
        session.stream.event("reset", request_id=self.request_id)
        self._finish(session, durable=_made_durable(session))


@dataclass(eq=False)
class Delete(Job):
    """Forget the stream, in memory and on disk."""

    def run(self, session: Session, busy: bool) -> None:
        """Delete the folder first: if that fails, the stream stays as it is."""
        stream = session.stream
        session.context.writer.delete(stream)
        session.reset()
        stream.forget()
        self._finish(session, deleted=True)


def _made_durable(session: Session) -> bool:
    try:
        session.save("auto")
    except OSError:
        return False
    return True


def _described(saved: Saved) -> dict[str, Any]:
    return {"seq": saved.name.seq, "version": saved.name.version, "kind": saved.name.kind, "bytes": saved.delta.size}
