"""The guard stands between the images and an adapting model; where that is safer, the source model predicts.

For every batch, invalid images are excluded, and a step after which something is not finite is undone. Some batches are
also predicted by the frozen source network and compared without labels (dpl.estimate.difference). If adaptation has
cost too many predictions, the guard freezes it: the state is put back and the source model predicts, until the adapted
model is better again (dpl.guard.evidence). The guard knows states and predictions, but no method.

Memory: one copy of the source weights, and two of what adaptation changes (before the step; last good one).

Away from the CPU the host waits for every number that it reads. The check of the images is one transfer, as without a
guard, and all that the guard asks after a step is another: whether everything is finite, and what a comparison says.
Only where the guard acts it reads more: a surprising batch is compared, a step undone, a state kept or put back.
"""

import contextlib
import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any, ClassVar

import torch
from torch import Tensor

from dpl.core.numerics import read_together
from dpl.core.state import Stateful
from dpl.estimate import Comparison, Watch
from dpl.estimate.difference import Comparing
from dpl.guard.events import EventLog, GuardEvent
from dpl.guard.evidence import Evidence
from dpl.guard.inputs import (
    NoFiniteAnswer,
    RowCheck,
    RowCheckResult,
    nonfinite_as_zeros,
    refused_as_zeros,
    split_useless,
    without_refused,
)
from dpl.guard.settings import GuardSettings
from dpl.guard.state_copy import SavedState, all_finite, are_finite, bounds, bounds_after_step, relative_change
from dpl.methods.model_state import ModelState, State

__all__ = ["Guard"]

_NOT_FINITE = "the source model's output is not finite"
_FROZEN = "frozen: the source model predicts"

Numbers = dict[str, list[float]]  # read on the host, by name


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
        self.event_log, self.good = EventLog(settings.log), SavedState()
        for name in ("rows", "evidence", "event_log", "good"):
            self.declare_part(name, getattr(self, name))
        self.report: dict[str, Any] = {}
        self._source_is_finite = False  # known of the answer to this batch
        self._origin: State = self.state()

    def reset(self) -> None:
        """Forget everything since the start."""
        self.restore(self._origin)

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Set everything to a copy of `state`, on the model's device."""
        super().restore(state)
        self.good.move(lambda value: value.to(self.watch.device))

    @property
    def frozen(self) -> bool:
        """Say whether the source model predicts instead of the adapted model."""
        return bool(self.evidence.frozen)

    @property
    def counts(self) -> dict[str, int]:
        """How often each action was taken."""
        return self.event_log.counts

    @property
    def events(self) -> deque[GuardEvent]:
        """The latest events, oldest first."""
        return self.event_log.events

    def call_on_event(self, callback: Callable[[GuardEvent], None] | None) -> None:
        """Call a function with every event from now on (None: no function)."""
        self.event_log.on_event = callback

    def step(self, images: Tensor, confirm: Callable[[Tensor], ModelState]) -> Tensor:
        """Predict a batch and adapt to it, as far as both are safe; `confirm` gets the valid images first."""
        examined = self.rows.examine(images)
        refused = dict(examined.refused)
        kept = without_refused(images, refused)
        state = confirm(kept if len(kept) else torch.zeros_like(images[:1]))
        self.report = {"guard": {"action": "none", "reason": "", "answered_by": "adapted", "signals": None}}
        self._source_is_finite = False
        self.batches += 1
        if len(kept) == 0:
            return self._for_all_rows(self._no_logits(images), refused, len(images))
        self.rows.update_peak(examined)
        self.evidence.count(len(kept))
        if examined.useless:
            return self._for_all_rows(self._answer_useful(state, images, examined), refused, len(images))
        try:
            logits = self._answer(state, kept)
        except NoFiniteAnswer as overflow:
            places = [row for row in range(len(images)) if row not in refused]
            refused |= {places[i]: _NOT_FINITE for i in overflow.rows}
            kept = without_refused(images, refused)
            logits = self._answer(state, kept) if len(kept) else self._no_logits(images)
        return self._for_all_rows(logits, refused, len(images))

    @torch.no_grad()
    def predict(self, images: Tensor, confirm: Callable[[Tensor], ModelState]) -> Tensor:
        """Predict a batch and change nothing."""
        examined = self.rows.examine(images)
        refused, (kept, learnt) = examined.refused, split_useless(images, examined)
        state = confirm(kept if len(kept) else torch.zeros_like(images[:1]))
        if len(kept) == 0:
            return refused_as_zeros(self._no_logits(images), refused, len(images))
        useful = kept[learnt] if examined.useless else kept
        by_source = self.frozen or len(useful) == 0
        logits = self.source(kept) if by_source else state.method.predict(useful).detach()
        if not by_source and examined.useless:
            logits = self.source(kept).index_copy(0, learnt, logits)
        if not all_finite([logits]):
            logits = self.source(kept)
        return refused_as_zeros(nonfinite_as_zeros(logits), refused, len(images))

    def source(self, images: Tensor) -> Tensor:
        """Return the logits of the frozen source model."""
        return self.watch.source(images)

    def _answer_useful(self, state: ModelState, images: Tensor, examined: RowCheckResult) -> Tensor:
        """Let the model see the useful images of a batch only; the source model predicts the others."""
        kept, learnt = split_useless(images, examined)
        logits, useful = nonfinite_as_zeros(self.source(kept)), kept[learnt]
        state.method.facts = {"updated": False, "reason": "no useful image in the batch"}
        if len(useful) == 0:
            self._serve_source(logits, finite=True)
        else:
            with contextlib.suppress(NoFiniteAnswer):
                logits = logits.index_copy(0, learnt, self._answer(state, useful).to(logits))
        row, why = next(iter(examined.useless.items()))
        self.report["useless"] = examined.useless
        about = f"{len(examined.useless)} of {len(images)} images, e.g. {row}: {why}"
        self._record("not_learnt", f"{about}; the source model predicts them", times=len(examined.useless))
        return logits

    def _answer(self, state: ModelState, images: Tensor) -> Tensor:
        """Predict valid images with the model that is believed to be better, and learn from them."""
        if self.frozen:
            return self._answer_while_frozen(state, images)
        put_watch_back, logits = self.watch.remember(), state.method(images)
        begun, read = self._observe_step(state, images, logits)
        if not are_finite(read["finite"]):
            put_watch_back()
            logits = self._undo_step(state, images)
            if self.frozen:
                return logits
            begun, read = self._observe(state, images, logits)
        found = self._conclude(state, images, logits, begun, read)
        if found is not None and self.evidence.shows_harm:
            return self._freeze(state, images, f"{self.settings.limit:.0f} or more predictions lost", found)
        if found is not None and self.evidence.shows_gain(found):
            self._keep_good_state(state)
        return logits

    def _observe_step(self, state: ModelState, images: Tensor, logits: Tensor) -> tuple[Comparing | None, Numbers]:
        """Observe the batch of a step that may have to be undone; also read whether everything is finite."""
        finite = bounds_after_step(state.method, logits)
        try:
            return self._observe(state, images, logits, finite=finite)
        except Exception:  # a network may refuse to predict with weights that are not finite
            read = {"finite": finite.tolist()}
            if are_finite(read["finite"]):
                raise
            return None, read

    def _undo_step(self, state: ModelState, images: Tensor) -> Tensor:
        """Undo a step after which something is not finite, and predict without it."""
        state.undo()
        state.method.facts = {"updated": False, "reason": "the step was undone: something was not finite"}
        self._record("undo", "logits, loss or parameters were not finite after the step")
        finite_rows = self.source(images).isfinite().all(dim=1).tolist()
        if not all(finite_rows):
            raise NoFiniteAnswer([row for row, finite in enumerate(finite_rows) if not finite])
        logits = state.method.predict(images).detach()
        return logits if all_finite([logits]) else self._freeze(state, images, "the model's output is not finite")

    def _observe(
        self, state: ModelState, images: Tensor, logits: Tensor, **also: Tensor
    ) -> tuple[Comparing | None, Numbers]:
        """Compare the models on this batch if that is due, else on a few images of it; read that, and `also`."""
        if self.watch.is_due(state, images, closely=self.evidence.is_suspicious):
            return self._look(state, images, logits, **also)
        if self.settings.glance > 0:
            asked, own = images[:: self.settings.glance], logits[:: self.settings.glance]
            also["differing"] = (self.source(asked).argmax(dim=1) != own.argmax(dim=1)).sum()
        return None, read_together(**also)

    def _look(
        self, state: ModelState, images: Tensor, logits: Tensor, source_logits: Tensor | None = None, **also: Tensor
    ) -> tuple[Comparing, Numbers]:
        """Compare the models on this batch; read what it says, how adaptation goes, and `also`."""
        self.watch.look(state, images, logits, source_logits)
        begun = self.watch.begin_comparison(len(images), self.settings.memory)
        return begun, read_together(compared=begun.numbers, **_adaptation_facts(state), **also)

    def _conclude(
        self, state: ModelState, images: Tensor, logits: Tensor, begun: Comparing | None, read: Numbers
    ) -> Comparison | None:
        """Return what the comparison says, and remember it; None if there was none, and none is called for."""
        if begun is None and self._is_surprising(len(images), read):
            self.watch.pay(state, images)
            begun, read = self._look(state, images, logits)
        if begun is None:
            return None
        found = begun.conclude(read["compared"])
        self.evidence.add(found)
        self.disagreement, self.glanced, self.differing = found.disagreement, 0, 0
        facts = {"lost": self.evidence.lost, "drift": read["drift"][0], "selected": read.get("selected", [None])[0]}
        self.report["guard"]["signals"] = asdict(found) | facts
        return found

    def _is_surprising(self, rows: int, read: Numbers) -> bool:
        """Say whether the models now disagree much more or less than in the last look, on the images glanced at."""
        s, expected = self.settings, self.disagreement
        if s.glance == 0:
            return False
        self.differing += int(read["differing"][0])
        self.glanced += -(-rows // s.glance)
        deviation = math.sqrt(max(expected * (1 - expected), 1 / s.memory) / self.glanced)
        return abs(self.differing / self.glanced - expected) > s.surprise * deviation

    def _keep_good_state(self, state: ModelState) -> None:
        """Copy a state that gains, for a later freeze to put back."""
        copied = dict(zip(state.names(), state.tensors(), strict=True)) | state.rest()
        if all_finite(copied.values()):
            self.good.save(copied)
            self.evidence.gained = 0.0

    def _freeze(self, state: ModelState, images: Tensor, why: str, found: Comparison | None = None) -> Tensor:
        """Put the state back, to the last good one once and else to the source model's, and serve the source model."""
        again = self.evidence.freezes > 0
        state.put_back(self.good.state() if self.good.exists and not again else None)
        where = "source weights" if again or not self.good.exists else "last good state"
        self.good.clear()
        self.evidence.switch(frozen=True)
        self.watch.clear()
        state.method.facts = {"updated": False, "reason": _FROZEN}
        self._record("freeze", f"{why}: back to the {where}, the source model predicts", found)
        return self._serve_source(self.source(images))

    def _answer_while_frozen(self, state: ModelState, images: Tensor) -> Tensor:
        """Serve the source model; now and then let the adapted model predict, too, and see whether it is better."""
        state.measure_stream(images)
        source = self.watch.source_and_shift(images)
        if not self.watch.is_due(state, images, spare=1.0):
            read = read_together(source=bounds([source]))
        else:
            logits = state.method.predict(images).detach()
            begun, read = self._look(
                state, images, logits, source_logits=source, source=bounds([source]), adapted=bounds([logits])
            )
            found = self._conclude(state, images, logits, begun, read)
            if self.evidence.shows_recovery and are_finite(read["adapted"]):
                reason = f"about {self.evidence.gained:.0f} predictions to gain: the adapted model predicts and adapts"
                self.evidence.switch(frozen=False)
                self._record("unfreeze", reason, found)
                state.method.facts = {"updated": False, "reason": "unfrozen: adapts from the next batch on"}
                return logits
        state.method.facts = {"updated": False, "reason": _FROZEN}
        return self._serve_source(source, finite=are_finite(read["source"]))

    def _serve_source(self, source: Tensor, *, finite: bool = False) -> Tensor:
        """Answer with the source model's logits; `finite` says that they are known to be."""
        self.report["guard"]["answered_by"], self._source_is_finite = "source", finite
        return source

    def _record(self, action: str, reason: str, found: Comparison | None = None, times: int = 1) -> None:
        self.report["guard"] |= {"action": action, "reason": reason}
        self.event_log.record(GuardEvent(self.batches, action, reason, found), times)

    def _no_logits(self, images: Tensor) -> Tensor:
        """Return logits without a row, in the right width: no image of the batch is valid."""
        width = self.source(torch.zeros_like(images[:1])).shape[1]
        return images.new_zeros(0, width)

    def _for_all_rows(self, logits: Tensor, refused: Mapping[int, str], count: int) -> Tensor:
        """Return logits for the whole batch; excluded images get zeros and an entry in the report."""
        answer = refused_as_zeros(logits, refused, count)
        bad = dict(refused)
        by_source = self.report["guard"]["answered_by"] == "source"
        if by_source and not self._source_is_finite and not all_finite([answer]):
            broken = (~answer.isfinite().all(dim=1)).nonzero()[:, 0].tolist()
            bad |= dict.fromkeys(broken, _NOT_FINITE)
            answer = nonfinite_as_zeros(answer)
        self.report["set_aside"] = bad
        if bad:
            row, why = next(iter(bad.items()))
            self._record("set_aside", f"{len(bad)} of {count} images, e.g. {row}: {why}", times=len(bad))
        if len(bad) == count:
            self.report |= {"updated": False, "reason": "every image was excluded"}
        return answer


def _adaptation_facts(state: ModelState) -> dict[str, Tensor]:
    """Return the drift from the source weights and, if known, the share of samples that the method learns from."""
    share = state.method.facts.get("selected", state.method.facts.get("confident"))
    drift = {"drift": relative_change(state.trained())}
    return drift if share is None else drift | {"selected": torch.as_tensor(share, dtype=torch.float64)}
