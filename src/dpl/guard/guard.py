"""The guard stands between the images and an adapting model; where that is safer, the source model predicts.

exclude     invalid images get zeros, and the source model predicts useless ones (dpl.guard.inputs)
step        the method predicts the others and adapts
undo        the step, if something is not finite after it
compare     some batches with the source model's predictions (dpl.estimate.difference)
freeze      if adaptation has cost too many predictions: the state is put back, and the source model predicts
unfreeze    once the adapted model is better again (dpl.guard.evidence)

The guard knows states and predictions, but no method. Memory: one copy of the source weights, and two of what
adaptation changes (before the step; last good one). Away from the CPU the host waits for every number that it reads:
the check of the images is one transfer, all that is asked after a step another. More is read only where the guard acts.
"""

import logging
import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any, ClassVar

import torch
from torch import Tensor

from dpl.core.numerics import all_finite, are_finite, bounds, nonfinite_as_zeros, nonfinite_rows, read_together
from dpl.core.state import Stateful, part_of
from dpl.estimate import Comparison, Watch
from dpl.estimate.difference import compared
from dpl.guard.events import ACTIONS, GuardEvent
from dpl.guard.evidence import Evidence
from dpl.guard.inputs import RowCheck, RowCheckResult, spread, without
from dpl.guard.settings import GuardSettings
from dpl.methods.model_state import ModelState, State, stays_on_host

__all__ = ["Guard"]

Confirm = Callable[[Tensor], ModelState]  # shows images to the network, which may find its classifier by them
Asked = dict[str, Tensor]  # what to read on the host, by name
Numbers = dict[str, list[float]]  # what was read
_log = logging.getLogger("dpl.guard")


class Guard(Stateful):
    """Watches one adapting model; made by `dpl.adapt(..., guard=True)` and found at `model.guard`."""

    host_reads: ClassVar[int] = 1  # in a step, beside the check of the images and the method's own

    batches: int
    disagreement: float  # share of images on which the models differed in the last look
    glanced: int  # images that the source model also predicted since then
    differing: int  # of these

    def __init__(self, settings: GuardSettings, watch: Watch) -> None:
        super().__init__()
        self.settings, self.watch = settings, watch
        self.declare(batches=0, disagreement=0.0, glanced=0, differing=0)
        self.rows, self.evidence = RowCheck(settings), Evidence(settings)
        self.event_log = Stateful()  # how often each action was taken; the events themselves are no state
        self.event_log.declare(**dict.fromkeys(ACTIONS, 0))
        for name in ("rows", "evidence", "event_log"):
            self.declare_part(name, getattr(self, name))
        self.events: deque[GuardEvent] = deque(maxlen=settings.log)  # the latest, oldest first
        self._on_event: Callable[[GuardEvent], None] | None = None
        self.good: State = {}  # the last good state of the model; empty if there is none
        self.report: dict[str, Any] = {}
        self._unsure = False  # whether a row of the answer to this batch may not be finite
        self._origin: State = self.state()

    def reset(self) -> None:
        """Forget everything since the start."""
        self.restore(self._origin)

    def state(self) -> State:
        """Return a copy of everything declared, and of the last good state."""
        return super().state() | {f"good.{key}": value.clone() for key, value in self.good.items()}

    def check(self, state: Mapping[str, Tensor]) -> None:
        """Raise if `state` does not fit; a good state is checked when the model takes it."""
        super().check({key: value for key, value in state.items() if not key.startswith("good.")})

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Set everything to a copy of `state`, on the model's device."""
        super().restore(state)
        self.good = {key: value.clone() for key, value in part_of(state, "good").items()}
        self.move(lambda value: value.to(self.watch.device))

    def move(self, transfer: Callable[[Tensor], Tensor]) -> None:
        """Move what lives on the model's device."""
        super().move(transfer)
        self.good = {key: value if stays_on_host(key) else transfer(value) for key, value in self.good.items()}

    @property
    def frozen(self) -> bool:
        """Say whether the source model predicts instead of the adapted model."""
        return bool(self.evidence.frozen)

    @property
    def counts(self) -> dict[str, int]:
        """How often each action was taken: images for `set_aside` and `not_learnt`, batches for the others."""
        return {action: getattr(self.event_log, action) for action in ACTIONS}

    def call_on_event(self, callback: Callable[[GuardEvent], None] | None) -> None:
        """Call a function with every event from now on (None: no function)."""
        self._on_event = callback

    def step(self, images: Tensor, confirm: Confirm) -> Tensor:
        """Predict a batch and adapt to it, as far as both are safe; `confirm` gets the valid images first."""
        examined, state, useful = self._exclude(images, confirm)
        self.report = {"guard": {"action": "none", "reason": "", "answered_by": "adapted", "signals": None}}
        self._unsure = False
        self.batches += 1
        valid = len(images) - len(examined.refused)
        if valid:
            self.rows.update_peak(examined)
            self.evidence.count(valid)
        if len(useful):
            logits = self._complete(self._answer(state, useful), images, examined)
        else:
            logits = self._predict_by_source(images, examined)
            if valid:
                state.method.facts = {"updated": False, "reason": "no useful image in the batch"}
                self.report["guard"]["answered_by"] = "source"
        if examined.useless:
            self.report["useless"] = examined.useless
            self._record_images("not_learnt", examined.useless, len(images), "; the source model predicts them")
        return self._report_excluded(logits, examined.refused)

    @torch.no_grad()
    def predict(self, images: Tensor, confirm: Confirm) -> Tensor:
        """Predict a batch and change nothing."""
        examined, state, useful = self._exclude(images, confirm)
        if len(useful) and not self.frozen:
            logits = state.method.predict(useful)
            if all_finite([logits]):
                return self._complete(logits, images, examined)
        return self._predict_by_source(images, examined)

    def _exclude(self, images: Tensor, confirm: Confirm) -> tuple[RowCheckResult, ModelState, Tensor]:
        """Check every image and confirm the valid ones; return also the images that the model may see."""
        examined = self.rows.examine(images)
        valid = without(images, examined.refused)
        state = confirm(valid if len(valid) else torch.zeros_like(images[:1]))
        return examined, state, without(images, examined.refused | examined.useless) if examined.useless else valid

    def _complete(self, logits: Tensor, images: Tensor, examined: RowCheckResult) -> Tensor:
        """Return logits for a whole batch: the useless images are the source model's, refused ones get zeros."""
        others = self._predict_by_source(images, examined) if examined.useless else None
        return spread(logits, examined.refused | examined.useless, len(images), others)

    def _predict_by_source(self, images: Tensor, examined: RowCheckResult) -> Tensor:
        """Return the source model's logits for a batch; zeros for images that are refused or overflow."""
        valid = without(images, examined.refused)
        logits = self.watch.source(valid) if len(valid) else self.watch.source(torch.zeros_like(images[:1]))[:0]
        return spread(nonfinite_as_zeros(logits), examined.refused, len(images))

    def _answer(self, state: ModelState, images: Tensor) -> Tensor:
        """Predict valid images with the model that is believed to be better, and learn from them."""
        if self.frozen:
            return self._answer_while_frozen(state, images)
        put_watch_back, logits = self.watch.remember(), state.method(images)
        finite = bounds([logits, state.method.facts.get("loss"), *state.method.trainable.values()])
        read = self._compare(state, images, logits, finite=finite)
        if are_finite(read["finite"]):
            return self._judge(state, images, logits, read)
        put_watch_back()
        return self._undo(state, images)

    def _undo(self, state: ModelState, images: Tensor) -> Tensor:
        """Undo a step after which something is not finite, and predict without it."""
        state.undo()
        state.begin(may_fail_later=True)  # what follows may be undone as well: by the guard, or as the call fails
        state.method.facts = {"updated": False, "reason": "the step was undone: something was not finite"}
        self._record("undo", "logits, loss or parameters were not finite after the step")
        source = self.watch.source(images)
        broken = nonfinite_rows(source)
        if broken:  # the images' fault: the others may be learned
            rest = without(images, broken)
            logits = spread(self._answer(state, rest), broken, len(images), source) if len(rest) else source
            self._unsure = True
            return logits
        logits = state.method.predict(images).detach()
        if not all_finite([logits]):
            return self._freeze(state, images, "the model's output is not finite")
        return self._judge(state, images, logits, self._compare(state, images, logits))

    def _compare(self, state: ModelState, images: Tensor, logits: Tensor, **asked: Tensor) -> Numbers:
        """Compare the models on this batch if that is due, else on a few images of it; read that, and what is asked."""
        try:
            if self.watch.is_due(state, images, closely=self.evidence.is_suspicious):
                asked |= self._look(state, images, logits)
            elif self.settings.glance > 0:
                few, own = images[:: self.settings.glance], logits[:: self.settings.glance]
                asked["differing"] = (self.watch.source(few).argmax(dim=1) != own.argmax(dim=1)).sum()
        except Exception:  # a network may refuse to predict with weights that are not finite
            if "finite" not in asked or are_finite(asked["finite"].tolist()):
                raise
        return read_together(**asked)

    def _look(self, state: ModelState, images: Tensor, logits: Tensor, source: Tensor | None = None) -> Asked:
        """Compare the models on this batch; return what to read: what that says, and how adaptation goes."""
        self.watch.look(state, images, logits, source)
        numbers = compared(self.watch.window, len(images), self.settings.memory, self.watch.shift)
        found = {"compared": numbers, "drift": _relative_change(state.trained())}
        share = state.method.facts.get("selected", state.method.facts.get("confident"))
        return found if share is None else found | {"selected": torch.as_tensor(share, dtype=torch.float64)}

    def _is_surprising(self, rows: int, read: Numbers) -> bool:
        """Say whether the models now disagree much more or less than in the last look, on the images glanced at."""
        if "differing" not in read:
            return False
        s, expected = self.settings, self.disagreement
        self.differing += int(read["differing"][0])
        self.glanced += -(-rows // s.glance)
        deviation = math.sqrt(max(expected * (1 - expected), 1 / s.memory) / self.glanced)
        return abs(self.differing / self.glanced - expected) > s.surprise * deviation

    def _judge(self, state: ModelState, images: Tensor, logits: Tensor, read: Numbers) -> Tensor:
        """Freeze a model that does harm, keep a copy of one that gains; return the logits of the one that predicts."""
        if self._is_surprising(len(images), read):
            self.watch.pay(state, images)
            read = read_together(**self._look(state, images, logits))
        if "compared" not in read:
            return logits
        found = self._conclude(read, len(images))
        if self.evidence.shows_harm:
            return self._freeze(state, images, f"{self.settings.limit:.0f} or more predictions lost", found)
        if self.evidence.shows_gain(found):
            self._keep_good_state(state)
        return logits

    def _conclude(self, read: Numbers, rows: int) -> Comparison:
        """Return what a comparison says, remember and report it."""
        found = Comparison.read(rows, read["compared"], self.watch.settings)
        self.evidence.add(found)
        self.disagreement, self.glanced, self.differing = found.disagreement, 0, 0
        facts = {"lost": self.evidence.lost, "drift": read["drift"][0], "selected": read.get("selected", [None])[0]}
        self.report["guard"]["signals"] = asdict(found) | facts
        return found

    def _keep_good_state(self, state: ModelState) -> None:
        """Copy a state that gains, for a later freeze to put back."""
        good = state.changing() | state.rest()
        if all_finite(good.values()):
            self.good = {key: value.clone() for key, value in good.items()}
            self.evidence.gained = 0.0

    def _freeze(self, state: ModelState, images: Tensor, why: str, found: Comparison | None = None) -> Tensor:
        """Put the state back, to the last good one once and else to the source model's, and serve the source model."""
        good, self.good = {} if self.evidence.freezes > 0 else self.good, {}
        state.put_back(good or None)
        self.evidence.switch(frozen=True)
        self.watch.clear()
        where = "last good state" if good else "source weights"
        self._record("freeze", f"{why}: back to the {where}, the source model predicts", found)
        return self._serve_source(state, self.watch.source(images))

    def _answer_while_frozen(self, state: ModelState, images: Tensor) -> Tensor:
        """Serve the source model; now and then let the adapted model predict, too, and see whether it is better."""
        state.measure_stream(images)
        source = self.watch.source_and_shift(images)
        asked = {"source": bounds([source])}
        if self.watch.is_due(state, images, spare=1.0):
            logits = state.method.predict(images).detach()
            asked |= self._look(state, images, logits, source) | {"adapted": bounds([logits])}
        read = read_together(**asked)
        if "compared" in read:
            found = self._conclude(read, len(images))
            if self.evidence.shows_recovery and are_finite(read["adapted"]):
                reason = f"about {self.evidence.gained:.0f} predictions to gain: the adapted model predicts and adapts"
                self.evidence.switch(frozen=False)
                self._record("unfreeze", reason, found)
                state.method.facts = {"updated": False, "reason": "unfrozen: adapts from the next batch on"}
                return logits
        return self._serve_source(state, source, finite=are_finite(read["source"]))

    def _serve_source(self, state: ModelState, source: Tensor, *, finite: bool = False) -> Tensor:
        """Answer with the source model's logits; `finite` says that they are known to be."""
        state.method.facts = {"updated": False, "reason": "frozen: the source model predicts"}
        self.report["guard"]["answered_by"], self._unsure = "source", not finite
        return source

    def _report_excluded(self, logits: Tensor, refused: dict[int, str]) -> Tensor:
        """Report which images were excluded, and answer with zeros where even the source model overflows."""
        broken = nonfinite_rows(logits) if self._unsure else []
        excluded = refused | dict.fromkeys(broken, "the source model's output is not finite")
        self.report["set_aside"] = excluded
        if excluded:
            self._record_images("set_aside", excluded, len(logits))
        if len(excluded) == len(logits):
            self.report |= {"updated": False, "reason": "every image was excluded"}
        return nonfinite_as_zeros(logits) if broken else logits

    def _record_images(self, action: str, images: Mapping[int, str], count: int, then: str = "") -> None:
        row, why = next(iter(images.items()))
        self._record(action, f"{len(images)} of {count} images, e.g. {row}: {why}{then}", times=len(images))

    def _record(self, action: str, reason: str, found: Comparison | None = None, times: int = 1) -> None:
        """Count an event, report and log it, and call the callback."""
        event = GuardEvent(self.batches, action, reason, found)
        self.report["guard"] |= {"action": action, "reason": reason}
        setattr(self.event_log, action, self.counts[action] + times)
        self.events.append(event)
        level = logging.WARNING if event.alarm else logging.INFO
        _log.log(level, "batch %d: %s: %s", event.batch, action, reason)
        if self._on_event is not None:
            self._on_event(event)


@torch.no_grad()
def _relative_change(pairs: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Return |new - old| / |old| over all pairs taken together, on their device."""
    if not pairs:
        return torch.zeros(())
    new, old = (list(values) for values in zip(*pairs, strict=True))
    moved, size = (torch.stack(torch._foreach_norm(x)).norm() for x in (torch._foreach_sub(new, old), old))
    return torch.div(moved, size.clamp(min=1e-12))
