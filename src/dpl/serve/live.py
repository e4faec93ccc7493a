"""A stream on a live model, its state as a difference from the source state, and the jobs that it can do.

Nothing else changes the adapted state of a stream.
"""

import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from dpl.core.errors import InputError, SnapshotError
from dpl.core.numerics import nonfinite_rows
from dpl.model.adaptive import AdaptiveModel
from dpl.runs.online import send
from dpl.serve.store import Difference, StreamSnapshot, size_of
from dpl.serve.stream import Stream

if TYPE_CHECKING:
    from dpl.serve.server import Server

__all__ = ["Act", "AdaptChoice", "Job", "LiveModel", "SourceState", "probe"]

Act = Callable[["LiveModel", "Job"], None]
AdaptChoice = Literal["auto", "wait", "off"]


class SourceState:
    """The state that every stream starts from; all streams share it and nothing changes it."""

    def __init__(self, state: Mapping[str, Tensor]) -> None:
        self._state = dict(state)
        self._weights = {k: v for k, v in state.items() if k.startswith("model.") and v.is_floating_point()}
        self._size = _norm(self._weights.values())

    def difference(self, state: Mapping[str, Tensor]) -> Difference:
        """Return what `restored` needs to rebuild `state` exactly; its tensors are on the CPU."""
        changed = {
            key: value.detach().cpu()
            for key, value in state.items()
            if key not in self._state or not same_bits(value, self._state[key])
        }
        return changed | dict.fromkeys(self._state.keys() - state)

    def restored(self, difference: Difference) -> dict[str, Tensor]:
        """Return the state from which `difference` was taken."""
        return {key: value for key, value in (self._state | dict(difference)).items() if value is not None}

    def drift(self, difference: Difference) -> float:
        """Return the change of the network's weights, relative to their norm."""
        moved = [(value, self._weights[key]) for key, value in difference.items() if key in self._weights]
        change = _norm([new.float() - old.cpu().float() for new, old in moved if new is not None])
        return change / self._size if self._size else 0.0


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Compare bits, not values: 0.0 and -0.0 are equal numbers, but the streams that follow from them differ."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    first, second = (value.detach().contiguous().reshape(-1).view(torch.uint8) for value in (one, other))
    return torch.equal(first, second.to(first.device))


def _norm(values: Collection[Tensor]) -> float:
    return math.sqrt(sum(float(value.double().square().sum()) for value in values))


@dataclass(eq=False)
class Job:
    """Something to do with a stream on a live model; the response is the result of a future."""

    request_id: str
    act: Act
    stream: Stream = field(init=False)
    tenant: str = ""
    busy: bool = False  # whether requests wait, so that optional work is skipped
    future: "Future[dict[str, Any]]" = field(default_factory=Future)
    enqueued: float = field(default_factory=time.monotonic)
    written: "Future[None] | None" = None  # what the response waits for
    holds: bool = False  # nobody uses the stream until that is done

    def respond(self, stream: Stream, **facts: Any) -> None:
        """Set the result."""
        about = {"stream": stream.id, "seq": stream.seq, "durable_through": stream.durable_through}
        self.future.set_result(about | facts)


class LiveModel:
    """A model in memory and the stream whose state it has, a nameless one at first; both are used by one thread."""

    def __init__(self, model: AdaptiveModel, server: "Server") -> None:
        self.model, self.server = model, server
        self.used = 0.0
        self.release()

    def release(self) -> None:
        """Leave the state of the model to nobody."""
        self.stream = Stream("")
        self.stream.difference = {}

    def load(self, stream: Stream) -> None:
        """Put a stream's state on the model, from memory or from disk; the one that was there stays in memory."""
        if self.stream is stream:
            return
        self.difference()
        try:
            if stream.difference is None:
                self._read_snapshot(stream)
            else:
                self._set_state(stream.difference)
        except Exception:
            self.release()
            raise
        self.stream = stream  # only now, as nobody takes a model whose stream is running

    def unload(self) -> None:
        """Take the stream's state off the model; it stays in memory."""
        self.difference()
        self.release()

    def difference(self) -> Difference:
        """Return the difference between the model's present state and the source state."""
        stream = self.stream
        if stream.stale or stream.difference is None:
            stream.difference = self.server.source.difference(self.model.state_dict())
            stream.drift, stream.stale = self.server.source.drift(stream.difference), False
        return stream.difference

    def _read_snapshot(self, stream: Stream) -> None:
        """Read the newest snapshot that is valid and fits; a stream without one starts from the source state."""
        snapshot, problems = self.server.store.newest(stream.id, use=lambda it: self._set_state(it.difference))
        for problem in problems:
            stream.event("snapshot_refused", reason=problem)
            self.server.metrics.refused_snapshots.inc()
        if snapshot is not None:
            stream.apply_snapshot(snapshot)
            stream.drift = self.server.source.drift(snapshot.difference)
            return
        self._set_state({})
        stream.difference = {}
        if problems:
            stream.note_change(0)
            stream.refused = True
            stream.event("started_over", reason="no snapshot could be read")

    def _set_state(self, difference: Difference) -> None:
        self.model.load_state_dict(self.server.source.restored(difference))

    def _restore(self, snapshot: StreamSnapshot) -> None:
        self._set_state(snapshot.difference)
        self.stream.note_change(snapshot.version)

    def _restore_source(self) -> None:
        self._set_state({})
        self.stream.note_change(0)
        self.stream.refused = False

    def _save(self, kind: str) -> "Future[None]":
        """Take a snapshot, which is written in the background; the result is there when it is on disk."""
        return self.server.writer.save(self.stream, self.stream.as_snapshot(kind, self.difference()))

    # Jobs.

    def predict(
        self, job: Job, *, images: Tensor, adapt: AdaptChoice = "auto", top: int = 1, probabilities: bool = False
    ) -> None:
        """Predict a batch and adapt to it: after the response if the method allows that, otherwise before it."""
        stream, model, images = self.stream, self.model, _like_model(images, self.model)
        stream.seq += 1
        stream.images += len(images)
        status, reason = self._plan(job, adapt)
        facts: dict[str, Any] = {"status": status, "reason": reason}
        if status == "done":
            logits = self._step(images, job.request_id)
            excluded = model.last.get("set_aside", {})
            facts |= stream.last_adaptation
        else:
            excluded = model.guard.rows.examine(images).refused if model.guard else {}
            logits = _finite(model.predict(images))
        durable = stream.seq - 1 if status == "scheduled" else stream.seq
        job.respond(
            stream,
            predictions=self._predictions(logits, excluded, top, probabilities),
            adaptation=facts,
            guard=stream.guard,
            durable_through=min(stream.durable_through, durable),
        )
        if status == "scheduled":
            self._step(images, job.request_id)
        elif status != "done":
            stream.skipped_batches += status == "skipped"
            self.server.metrics.adaptations.labels(status).inc()
            stream.event("predict", request_id=job.request_id, images=len(images), adaptation=status, reason=reason)

    def _plan(self, job: Job, adapt: AdaptChoice) -> tuple[str, str | None]:
        """Return what the response says about the adaptation, and why there is none."""
        if adapt == "off":
            return "off", "the request has adapt=off"
        if job.busy and adapt != "wait":
            return "skipped", "requests are waiting longer than the latency budget"
        if self.server.writer.problem and self.server.settings.on_storage_failure == "stop":
            return "skipped", "the state folder cannot be written"
        return "scheduled" if self.server.first and adapt != "wait" else "done", None

    def _step(self, images: Tensor, request_id: str) -> Tensor:
        """Predict and adapt, and save the state if it has changed often enough."""
        start, model, stream, server = time.monotonic(), self.model, self.stream, self.server
        counts = Counter(model.guard.counts if model.guard else {})
        logits = self._adapted(images)
        facts = {key: value for key, value in model.last.items() if isinstance(value, (bool, int, float, str))}
        updated = bool(facts.get("updated", True))
        stream.last_adaptation = facts
        stream.note_change()
        stream.steps += 1
        stream.adapted_batches += updated
        stream.estimate = None if model.watch is None else model.estimate().as_dict()
        self._note_guard(counts)
        seconds = time.monotonic() - start
        server.step_seconds = 0.8 * server.step_seconds + 0.2 * seconds if server.step_seconds else seconds
        server.metrics.adaptations.labels("updated" if updated else "no_update").inc()
        stream.event("predict", request_id=request_id, images=len(images), adaptation="adapted", updated=updated)
        if stream.steps - stream.captured >= server.settings.snapshot_every:
            self._save("auto")
        return logits

    def _adapted(self, images: Tensor) -> Tensor:
        """Adapt; return to the newest valid snapshot if the output is not finite, or a step fails without the guard.

        A batch that the model refuses has changed nothing, and the guard undoes a failed step itself.
        """
        logits = None
        try:
            logits = self.model(images)
            return _finite(logits)
        except Exception as error:
            if logits is not None or (self.model.guard is None and not isinstance(error, InputError)):
                if self.server.store.newest(self.stream.id, use=self._restore)[0] is None:
                    self._restore_source()
                self.stream.event("recovered", version=self.stream.version)
            raise

    def _note_guard(self, before: Counter[str]) -> None:
        """Record what the guard did with the last batch: in the status, the events and the metrics."""
        guard = self.model.guard
        if guard is None:
            return
        report = dict(self.model.last["guard"])
        self.stream.guard = {**report, "frozen": guard.frozen, "counts": {k: n for k, n in guard.counts.items() if n}}
        for action, count in (Counter(guard.counts) - before).items():
            self.server.metrics.guard.labels(action).inc(count)
        if report["action"] != "none":
            self.stream.event("guard", action=report["action"], reason=report["reason"])

    def _predictions(
        self, logits: Tensor, excluded: Mapping[int, str], top: int, probabilities: bool
    ) -> list[dict[str, Any]]:
        """Return the prediction of each image, or why it has none; record their confidence and classes."""
        blank = (logits == 0).all(dim=1).nonzero().flatten().tolist()  # so the guard marks what has no prediction
        errors = dict.fromkeys(blank, "the network's output for this image is not finite") | dict(excluded)
        names, rows = self.server.names, logits.softmax(dim=1)
        best = rows.topk(min(top, rows.shape[1]), dim=1)
        predictions = []
        for row, values, labels in zip(rows, best.values.tolist(), best.indices.tolist(), strict=True):
            ranked = [
                {"class": label, "name": names[label], "confidence": value}
                for value, label in zip(values, labels, strict=True)
            ]
            more = {"top": ranked} if top > 1 else {}
            predictions.append(ranked[0] | more | ({"probabilities": row.tolist()} if probabilities else {}))
        for i, reason in errors.items():
            predictions[i] = {"class": None, "name": None, "confidence": None, "error": reason}
        good = [row for row in predictions if "error" not in row]
        if good:
            self.stream.confidence.append(sum(row["confidence"] for row in good) / len(good))
            self.stream.classes.extend(row["class"] for row in good)
        self.server.metrics.images.inc(len(good))
        return predictions

    def snapshot(self, job: Job) -> None:
        """Write a snapshot of the stream to disk; manual snapshots are counted separately from automatic ones."""
        self.stream.seq += 1
        job.written = self._save("manual")
        taken = self.stream.as_snapshot("manual", self.difference())
        job.respond(self.stream, snapshot={**taken.describe(), "bytes": size_of(taken.difference)})

    def rollback(self, job: Job, *, to: int | None = None) -> None:
        """Return to a snapshot: the newest one of an earlier state, or the one named by `to`; then save that state."""
        stream, store = self.stream, self.server.store
        known = store.snapshots(stream.id)
        chosen = [it for it in known if (it.version < stream.version if to is None else it.seq == to)]
        found, problems = store.newest(stream.id, chosen, use=self._restore)
        if found is None:
            wanted = f"snapshot of an earlier state than version {stream.version}" if to is None else f"snapshot {to}"
            reason = f" ({problems[0]})" if problems else ""
            raise SnapshotError(f"no {wanted}{reason}; there are {[it.seq for it in known] or 'none'}; try reset")
        stream.seq += 1
        stream.changed = stream.seq
        stream.event("rollback", request_id=job.request_id, to=found.seq, version=found.version)
        job.written = self._save("auto")
        job.respond(stream, restored=found.describe())

    def reset(self, job: Job) -> None:
        """Return the stream to the source model, exactly."""
        self.stream.seq += 1
        self._restore_source()
        self.stream.event("reset", request_id=job.request_id)
        job.written = self._save("auto")
        job.respond(self.stream)

    def delete(self, job: Job) -> None:
        """Delete the stream, in memory and on disk."""
        stream = self.stream
        facts = {"seq": stream.seq, "durable_through": stream.durable_through}  # as it was
        self.unload()
        job.written, job.holds = self.server.writer.delete(stream), True
        job.written.add_done_callback(partial(self.server.end_delete, stream))  # before the response follows
        job.respond(stream, **facts, deleted=True)


def probe(model: AdaptiveModel, shape: tuple[int, ...]) -> tuple[int, bool]:
    """Return the number of classes, and whether the output of a step is the prediction from before it.

    If it is, the server can respond first. Two steps are tried, which also works for methods of third parties, and the
    model is reset.
    """
    images = _like_model(torch.rand(8, *shape, generator=torch.Generator().manual_seed(0)), model)
    first = getattr(model.settings, "output", "before") == "before"
    for _ in range(2):
        before = model.predict(images)
        first &= torch.allclose(before, model(images), rtol=1e-4, atol=1e-5)
    model.reset()
    return before.shape[1], first


def _like_model(images: Tensor, model: AdaptiveModel) -> Tensor:
    """Return images on the model's device, in its precision."""
    like = next(model.model.parameters())
    return send(images.to(like.dtype), like.device)


def _finite(logits: Tensor) -> Tensor:
    logits = logits.detach().float().cpu()
    if broken := nonfinite_rows(logits):
        raise InputError(f"images {broken[:8]} lead to non-finite outputs; remove them")
    return logits
