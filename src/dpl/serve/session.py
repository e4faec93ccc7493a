"""A stream on a live model: the only place where what a stream has learned changes."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from dpl.core.errors import InputError, SnapshotError
from dpl.model.adaptive import AdaptiveModel
from dpl.serve.delta import Delta, SourceState
from dpl.serve.metrics import Metrics
from dpl.serve.settings import ServeSettings
from dpl.serve.store import Kind, Saved, StreamStore
from dpl.serve.stream import Stream
from dpl.serve.writer import Writer

__all__ = ["Context", "Seen", "Session", "Slot", "answers_first"]


@dataclass
class Context:
    """What all sessions of a server share."""

    settings: ServeSettings
    source: SourceState
    store: StreamStore
    writer: Writer
    metrics: Metrics
    names: Sequence[str]
    first: bool  # a prediction is answered before its batch is adapted to
    step_seconds: float = 0.0  # how long an adaptation takes, smoothed

    def note_step(self, seconds: float) -> None:
        """Learn how long an adaptation takes."""
        self.step_seconds = 0.8 * self.step_seconds + 0.2 * seconds if self.step_seconds else seconds


@dataclass(frozen=True)
class Seen:
    """The answer to a batch: logits on the CPU, rows without an answer and why, and what the step did."""

    logits: Tensor
    set_aside: dict[int, str]
    facts: dict[str, Any]

    def errors(self) -> dict[int, str]:
        """Rows for which there is no prediction; the guard answers them with zeros."""
        blank = (self.logits == 0).all(dim=1).nonzero().flatten().tolist()
        return dict.fromkeys(blank, "the network gives no finite output for it") | self.set_aside


@dataclass(eq=False)
class Slot:
    """A live model and the stream whose state it carries at present."""

    model: AdaptiveModel
    stream: Stream | None = None
    busy: bool = False
    used: float = field(default=0.0)


class Session:
    """One stream, on one live model, in one thread."""

    def __init__(self, stream: Stream, slot: Slot, context: Context) -> None:
        self.stream, self.slot, self.context = stream, slot, context

    def enter(self) -> None:
        """Put the stream's state on the model, from memory or from disk."""
        if self.stream.delta is None:
            self._wake()
        if self.slot.stream is not self.stream:
            self._load(self.stream.delta or Delta())
            self.slot.stream = self.stream
            self.context.metrics.swaps.inc()

    def leave(self) -> None:
        """Take the stream's state off the model."""
        self.current_delta()
        self.slot.stream = None

    def predict(self, images: Tensor) -> Seen:
        """Predict without a change."""
        model, images = self.slot.model, self._moved(images)
        aside = {} if model.guard is None else model.guard.rows.examine(images).refused
        return Seen(_finite(model.predict(images)), aside, {})

    def step(self, images: Tensor) -> Seen:
        """Predict and adapt; return the logits and what the step did."""
        start, model = time.monotonic(), self.slot.model
        counts = {} if model.guard is None else model.guard.counts
        logits = self._step_or_recover(self._moved(images))
        stream, facts = self.stream, _plain(model.last)
        stream.note_change()
        stream.adapted += 1
        stream.updates += bool(facts.get("updated", True))
        stream.last = facts
        self._note_guard(counts)
        self.context.note_step(time.monotonic() - start)
        return Seen(logits, dict(model.last.get("set_aside", {})), facts)

    def _step_or_recover(self, images: Tensor) -> Tensor:
        """A refused batch changes nothing, and the guard undoes a broken step; else the state is given up."""
        guarded = self.slot.model.guard is not None
        try:
            logits = self.slot.model(images)
        except InputError:
            raise
        except Exception:
            if not guarded:
                self.recover()
            raise
        try:
            return _finite(logits)
        except InputError:
            self.recover()
            raise

    def _note_guard(self, before: Mapping[str, int]) -> None:
        """Keep what the guard did with the last batch, for the stream's status, its events and the metrics."""
        guard = self.slot.model.guard
        if guard is None:
            return
        report = dict(self.slot.model.last["guard"])
        self.stream.guard = {**report, "frozen": guard.frozen, "counts": {k: n for k, n in guard.counts.items() if n}}
        for action, count in guard.counts.items():
            if count > before[action]:
                self.context.metrics.guard.labels(action).inc(count - before[action])
        if report["action"] != "none":
            self.stream.event("guard", action=report["action"], reason=report["reason"])

    def save_if_due(self) -> None:
        """Hand the state to the writer every so many adapted batches."""
        if self.stream.adapted - self.stream.captured >= self.context.settings.snapshot_every:
            self.context.writer.save_soon(self.stream, self._as_saved("auto"))

    def save(self, kind: Kind) -> Saved:
        """Put the state on the disk and return when it is there; raises OSError if it cannot be."""
        saved = self._as_saved(kind)
        self.context.writer.save_now(self.stream, saved)
        return saved

    def restore(self, saved: Saved) -> None:
        """Set the state to that of a snapshot, as a new step in the stream's history."""
        self._load(saved.delta)
        self.stream.note_change(saved.name.version)

    def reset(self) -> None:
        """Return to the source, bit for bit."""
        self._load(Delta())
        self.stream.note_change(0)

    def recover(self) -> None:
        """After a step that broke off half-way: back to the newest good snapshot, or to the source."""
        saved, _ = self.context.store.newest(self.stream.id)
        self._load(saved.delta if saved else Delta())
        self.stream.note_change(saved.name.version if saved else 0)
        self.stream.event("recovered", version=self.stream.version)

    def current_delta(self) -> Delta:
        """Return the difference between the model's present state and the source."""
        if self.stream.stale or self.stream.delta is None:
            self.stream.delta = self.context.source.difference(self.slot.model.state_dict())
            self.stream.drift = self.context.source.drift(self.stream.delta)
            self.stream.stale = False
        return self.stream.delta

    def _as_saved(self, kind: Kind) -> Saved:
        self.stream.captured = self.stream.adapted
        return self.stream.as_saved(kind, self.current_delta())

    def _wake(self) -> None:
        """Read the newest good snapshot; a stream without one starts from the source, and says so if it had some."""
        saved, problems = self.context.store.newest(self.stream.id)
        for problem in problems:
            self.stream.event("snapshot_refused", reason=problem)
            self.context.metrics.refused_snapshots.inc()
        if saved is None:
            self.stream.delta, self.stream.unread = Delta(), False
            if problems:
                self.stream.note_change(0)
                self.stream.event("started_over", reason="no snapshot could be read")
        else:
            self.stream.take_over(saved)
            self.stream.drift = self.context.source.drift(saved.delta)

    def _load(self, delta: Delta) -> None:
        try:
            self.slot.model.load_state_dict(self.context.source.restored(delta))
        except SnapshotError:
            self.slot.stream = None
            raise

    def _moved(self, images: Tensor) -> Tensor:
        like = next(self.slot.model.model.parameters())
        return images.to(like.device, like.dtype)


def answers_first(model: AdaptiveModel, images: Tensor) -> bool:
    """Find out whether a step's answer is the prediction from before it, so that it can be given first.

    Tried on `images`, after which the model is reset: methods differ, and also those of third parties are to be told.
    """
    if getattr(model.settings, "output", "before") != "before":
        return False
    like = next(model.model.parameters())
    images = images.to(like.device, like.dtype)
    same = True
    for _ in range(2):
        before = model.predict(images)
        same &= torch.allclose(before, model(images), rtol=1e-4, atol=1e-5)
    model.reset()
    return same


def _finite(logits: Tensor) -> Tensor:
    logits = logits.detach().float().cpu()
    good = logits.isfinite().all(dim=1)
    if not good.all():
        rows = (~good).nonzero().flatten().tolist()
        raise InputError(f"images {rows[:8]} lead to non-finite outputs; leave them out")
    return logits


def _plain(facts: Any) -> dict[str, Any]:
    """Copy a step's facts; what is not a number, a word or a truth value is left out."""
    return {key: facts[key] for key in facts if isinstance(facts[key], (bool, int, float, str))}
