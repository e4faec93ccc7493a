"""A stream on a live model, and its state as a difference from the source state.

Nothing else changes the adapted state of a stream.
"""

import math
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dpl.core.errors import InputError
from dpl.model.adaptive import AdaptiveModel
from dpl.runs.online import send
from dpl.serve.metrics import Metrics
from dpl.serve.settings import ServeSettings
from dpl.serve.store import Kind, StateDifference, StreamSnapshot, StreamStore
from dpl.serve.stream import Stream
from dpl.serve.writer import Writer

__all__ = ["BatchAnswer", "LiveModel", "ServerContext", "Session", "SourceState", "probe"]

_PROBE_IMAGES = 8


class SourceState:
    """The state that every stream starts from; all streams share it and nothing changes it."""

    def __init__(self, state: Mapping[str, Tensor]) -> None:
        self._state = dict(state)
        self._norm = math.sqrt(sum(_energy(value) for key, value in state.items() if _is_weight(key, value)))

    def difference(self, state: Mapping[str, Tensor]) -> StateDifference:
        """Return what `restored` needs to rebuild `state` exactly; its tensors are on the CPU."""
        changed = {
            key: value.detach().cpu()
            for key, value in state.items()
            if key not in self._state or not same_bits(value, self._state[key])
        }
        return StateDifference(changed, tuple(sorted(set(self._state) - set(state))))

    def restored(self, difference: StateDifference) -> dict[str, Tensor]:
        """Return the state from which `difference` was taken."""
        removed = set(difference.removed)
        return {key: value for key, value in (self._state | dict(difference.changed)).items() if key not in removed}

    def drift(self, difference: StateDifference) -> float:
        """Return the change of the network's weights, relative to their norm."""
        moved = 0.0
        for key, value in difference.changed.items():
            if key in self._state and _is_weight(key, value):
                moved += _energy(value.float() - self._state[key].cpu().float())
        return math.sqrt(moved) / self._norm if self._norm else 0.0


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Compare bits, not values: 0.0 and -0.0 are equal numbers, but the streams that follow from them differ."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    first, second = (value.detach().contiguous().reshape(-1).view(torch.uint8) for value in (one, other))
    return torch.equal(first, second.to(first.device))


def _is_weight(key: str, value: Tensor) -> bool:
    return key.startswith("model.") and value.is_floating_point()


def _energy(value: Tensor) -> float:
    return float(value.double().square().sum())


@dataclass
class ServerContext:
    """What all sessions of a server share."""

    settings: ServeSettings
    source: SourceState
    store: StreamStore
    writer: Writer
    metrics: Metrics
    names: Sequence[str]
    first: bool  # respond to a prediction before adapting to its batch
    step_seconds: float = 0.0  # smoothed time of one adaptation

    def note_step(self, seconds: float) -> None:
        """Update the time that an adaptation takes."""
        self.step_seconds = 0.8 * self.step_seconds + 0.2 * seconds if self.step_seconds else seconds


class BatchAnswer(NamedTuple):
    """The logits of a batch (on the CPU), the images without a prediction and why, and facts about the step."""

    logits: Tensor
    errors: dict[int, str]
    facts: dict[str, Any]


@dataclass(eq=False)
class LiveModel:
    """A model in memory and the stream whose state it has at present."""

    model: AdaptiveModel
    stream: Stream | None = None
    busy: bool = False
    used: float = 0.0


class Session:
    """One stream, on one live model, in one thread."""

    def __init__(self, stream: Stream, live: LiveModel, context: ServerContext) -> None:
        self.stream, self.live, self.context = stream, live, context

    def load(self) -> None:
        """Put the stream's state on the model, from memory or from disk."""
        if self.live.stream is self.stream:
            return
        self.live.stream = None
        if self.stream.difference is None:
            self._read_snapshot()
        else:
            self._set_state(self.stream.difference)
        self.live.stream = self.stream
        self.context.metrics.swaps.inc()

    def unload(self) -> None:
        """Take the stream's state off the model; it stays in memory."""
        self.current_difference()
        self.live.stream = None

    def predict(self, images: Tensor) -> BatchAnswer:
        """Predict without adapting."""
        model, images = self.live.model, _like_model(images, self.live.model)
        excluded = {} if model.guard is None else model.guard.rows.examine(images).refused
        return _answer(_finite(model.predict(images)), excluded, {})

    def step(self, images: Tensor) -> BatchAnswer:
        """Predict and adapt."""
        start, model, stream = time.monotonic(), self.live.model, self.stream
        counts = {} if model.guard is None else model.guard.counts
        logits = self._step_or_recover(_like_model(images, model))
        stream.last = {key: value for key, value in model.last.items() if isinstance(value, (bool, int, float, str))}
        stream.note_change()
        stream.steps += 1
        stream.adapted += bool(stream.last.get("updated", True))
        stream.estimate = None if model.watch is None else model.estimate().as_dict()
        self._note_guard(counts)
        self.context.note_step(time.monotonic() - start)
        return _answer(logits, model.last.get("set_aside", {}), stream.last)

    def _step_or_recover(self, images: Tensor) -> Tensor:
        """Adapt; restore a snapshot if a step without the guard fails, or if the output is not finite.

        A batch that the model refuses has changed nothing, and the guard undoes a failed step itself.
        """
        try:
            logits = self.live.model(images)
        except Exception as error:
            if self.live.model.guard is None and not isinstance(error, InputError):
                self.recover()
            raise
        try:
            return _finite(logits)
        except InputError:
            self.recover()
            raise

    def _note_guard(self, before: Mapping[str, int]) -> None:
        """Record what the guard did with the last batch: in the status, the events and the metrics."""
        guard = self.live.model.guard
        if guard is None:
            return
        report = dict(self.live.model.last["guard"])
        self.stream.guard = {**report, "frozen": guard.frozen, "counts": {k: n for k, n in guard.counts.items() if n}}
        for action, count in guard.counts.items():
            if count > before[action]:
                self.context.metrics.guard.labels(action).inc(count - before[action])
        if report["action"] != "none":
            self.stream.event("guard", action=report["action"], reason=report["reason"])

    def save_if_due(self) -> None:
        """Save the state if it has changed often enough."""
        if self.stream.steps - self.stream.captured >= self.context.settings.snapshot_every:
            self.save("auto")

    def save(self, kind: Kind) -> "Future[None]":
        """Take a snapshot, which is written in the background; the result is there when it is on disk."""
        return self.context.writer.save(self.stream, self.stream.as_snapshot(kind, self.current_difference()))

    def restore(self, snapshot: StreamSnapshot) -> None:
        """Set the state to that of a snapshot."""
        self._set_state(snapshot.difference)
        self.stream.note_change(snapshot.name.version)

    def reset(self) -> None:
        """Return to the source state, exactly."""
        self._set_state(StateDifference())
        self.stream.note_change(0)
        self.stream.refused = False

    def recover(self) -> None:
        """Return to the newest valid snapshot or, if there is none, to the source state."""
        if self.context.store.newest(self.stream.id, use=self.restore)[0] is None:
            self.reset()
        self.stream.event("recovered", version=self.stream.version)

    def current_difference(self) -> StateDifference:
        """Return the difference between the model's present state and the source state."""
        if self.stream.stale or self.stream.difference is None:
            self.stream.difference = self.context.source.difference(self.live.model.state_dict())
            self.stream.drift = self.context.source.drift(self.stream.difference)
            self.stream.stale = False
        return self.stream.difference

    def _read_snapshot(self) -> None:
        """Read the newest snapshot that is valid and fits; a stream without one starts from the source state."""
        stream = self.stream
        snapshot, problems = self.context.store.newest(stream.id, use=lambda it: self._set_state(it.difference))
        for problem in problems:
            stream.event("snapshot_refused", reason=problem)
            self.context.metrics.refused_snapshots.inc()
        if snapshot is not None:
            stream.apply_snapshot(snapshot)
            stream.drift = self.context.source.drift(snapshot.difference)
            return
        self._set_state(StateDifference())
        stream.difference = StateDifference()
        if problems:
            stream.note_change(0)
            stream.refused = True
            stream.event("started_over", reason="no snapshot could be read")

    def _set_state(self, difference: StateDifference) -> None:
        self.live.model.load_state_dict(self.context.source.restored(difference))


def _like_model(images: Tensor, model: AdaptiveModel) -> Tensor:
    """Return images on the model's device, in its precision."""
    like = next(model.model.parameters())
    return send(images.to(like.dtype), like.device)


def probe(model: AdaptiveModel, shape: tuple[int, ...]) -> tuple[int, bool]:
    """Return the number of classes, and whether the output of a step is the prediction from before it.

    If it is, the server can respond first. Two steps are tried, which also works for methods of third parties, and the
    model is reset.
    """
    images = _like_model(torch.rand(_PROBE_IMAGES, *shape, generator=torch.Generator().manual_seed(0)), model)
    first = getattr(model.settings, "output", "before") == "before"
    for _ in range(2):
        before = model.predict(images)
        first &= torch.allclose(before, model(images), rtol=1e-4, atol=1e-5)
    model.reset()
    return before.shape[1], first


def _finite(logits: Tensor) -> Tensor:
    logits = logits.detach().float().cpu()
    good = logits.isfinite().all(dim=1)
    if not good.all():
        images = (~good).nonzero().flatten().tolist()
        raise InputError(f"images {images[:8]} lead to non-finite outputs; remove them")
    return logits


def _answer(logits: Tensor, excluded: Mapping[int, str], facts: dict[str, Any]) -> BatchAnswer:
    """Return the answer; the guard gives images without a prediction logits of zero."""
    blank = (logits == 0).all(dim=1).nonzero().flatten().tolist()
    errors = dict.fromkeys(blank, "the network's output for this image is not finite") | dict(excluded)
    return BatchAnswer(logits, errors, facts)
