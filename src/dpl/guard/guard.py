"""The guard stands between the images and an adapting model; where that is safer, the source model predicts.

For every batch, invalid images are excluded, and a step after which something is not finite is undone. Every few
batches, some images are also predicted by a frozen copy of the source network. If adaptation loses predictions against
it (dpl.guard.comparison), the guard escalates (dpl.guard.policy): back to the last healthy state, back to the source
model, or a freeze, in which the source model predicts until a later trial. The guard knows states and predictions, but
no method.

Memory: one copy of the source weights, and two of what adaptation changes (before the step; last healthy).
"""

import contextlib
import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn

from dpl.core.state import Stateful
from dpl.estimate import Watch
from dpl.guard.batch_dependence import stable_in_larger_batch
from dpl.guard.comparison import ComparisonResult, SourceComparison
from dpl.guard.events import EventLog, GuardEvent
from dpl.guard.evidence import EstimateTest
from dpl.guard.inputs import (
    NoFiniteAnswer,
    RowCheck,
    RowCheckResult,
    nonfinite_as_zeros,
    refused_as_zeros,
    split_useless,
    without_refused,
)
from dpl.guard.policy import FREEZE, REASONS, ROLL_BACK, SMALL_BATCH, TRIAL_ROWS, EscalationPolicy, SmallBatchTrial
from dpl.guard.settings import GuardSettings
from dpl.guard.state_copy import SavedState, StateBuffer, all_finite, is_finite_after_step, relative_change
from dpl.methods.model_state import ModelState, State
from dpl.network.split import logits_of, private_copy

__all__ = ["Guard"]

_FRESH = 128  # images that are all compared after a start, a reset or an unfreeze
_RECENT = 128  # images over which the estimated difference is tested, at least those of the batch
_SAVE_EVERY = 16  # batches between copies of a healthy state
_NOT_FINITE = "the source model's output is not finite"


class Guard(Stateful):
    """Watches one adapting model; made by `dpl.adapt(..., guard=True)` and found at `model.guard`."""

    batches: int
    rows_compared: int  # since the last (re)start
    batches_since_comparison: int
    batches_since_save: int  # of a healthy state
    trial_regret: float  # estimated predictions lost in a trial after a freeze

    def __init__(self, settings: GuardSettings, model: nn.Module, watch: Watch | None = None) -> None:
        super().__init__()
        self.settings, self._watch = settings, watch
        self._source = private_copy(model).eval().requires_grad_(False)
        self.declare(batches=0, rows_compared=0, batches_since_comparison=0, batches_since_save=0, trial_regret=0.0)
        self.rows, self.comparison = RowCheck(settings), SourceComparison(settings)
        self.policy, self.small_batch_trial = EscalationPolicy(settings), SmallBatchTrial()
        self.estimate_test = EstimateTest(settings.estimated_loss, settings.false_alarm)
        self.event_log, self.healthy = EventLog(settings.log), SavedState()
        for name in ("rows", "comparison", "policy", "small_batch_trial", "estimate_test", "event_log", "healthy"):
            self.declare_part(name, getattr(self, name))
        self._buffer = StateBuffer()
        self.report: dict[str, Any] = {}
        self._origin: State = self.state()

    def reset(self) -> None:
        """Forget everything since the start."""
        self.restore(self._origin)

    @property
    def frozen(self) -> bool:
        """Say whether the source model predicts instead of the adapted model."""
        return bool(self.policy.frozen)

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

    def move(self, transfer: Callable[[Tensor], Tensor]) -> None:
        """Move the source network to another device or type, too."""
        self._source._apply(transfer)  # type: ignore[no-untyped-call]
        self._buffer = StateBuffer()
        super().move(transfer)

    def step(self, images: Tensor, confirm: Callable[[Tensor], ModelState]) -> Tensor:
        """Predict a batch and adapt to it, as far as both are safe; `confirm` gets the valid images first."""
        examined = self.rows.examine(images)
        refused = dict(examined.refused)
        kept = without_refused(images, refused)
        state = confirm(kept if len(kept) else torch.zeros_like(images[:1]))
        self.report = {"guard": {"action": "none", "reason": "", "answered_by": "adapted", "signals": None}}
        self.batches += 1
        if len(kept) == 0:
            return self._for_all_rows(self._no_logits(images), refused, len(images))
        self.rows.update_peak(examined)
        self.policy.count_rows(len(kept))
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
        by_source = self.frozen or self._is_on_trial(kept) or len(useful) < min(SMALL_BATCH, len(kept))
        logits = self.source(kept) if by_source else state.method.predict(useful).detach()
        if not by_source and examined.useless:
            logits = self.source(kept).index_copy(0, learnt.nonzero()[:, 0], logits)
        if not all_finite([logits]):
            logits = self.source(kept)
        return refused_as_zeros(nonfinite_as_zeros(logits), refused, len(images))

    @torch.no_grad()
    def source(self, images: Tensor) -> Tensor:
        """Return the logits of the frozen source model."""
        return logits_of(self._source(images))

    def _answer_useful(self, state: ModelState, images: Tensor, examined: RowCheckResult) -> Tensor:
        """Let the model see the useful images of a batch only; the source model predicts the others."""
        kept, learnt = split_useless(images, examined)
        useful = kept[learnt]
        few = len(useful) < min(SMALL_BATCH, len(kept))  # statistics of what is left would be poor
        reason = "too few useful images in the batch"
        state.method.facts = {"updated": False, "reason": reason}
        logits = nonfinite_as_zeros(self.source(kept))
        if few:
            self._serve_source(logits)
        else:
            with contextlib.suppress(NoFiniteAnswer):
                logits[learnt] = self._answer(state, useful).to(logits)
        row, why = next(iter(examined.useless.items()))
        self.report["useless"] = examined.useless
        about = f"{len(examined.useless)} of {len(images)} images, e.g. {row}: {why}"
        self._record("not_learnt", f"{about}; the source model predicts them", times=len(examined.useless))
        return logits

    def _answer(self, state: ModelState, images: Tensor) -> Tensor:
        if self.frozen:
            return self._answer_while_frozen(state, images)
        logits = self._adapt(state, images)
        if self._test_estimate(state, images, logits) and self.estimate_test.is_worse:
            return self._escalate(state, images, self._estimated())
        self.batches_since_comparison += 1
        self.batches_since_save += 1
        rows = self._rows_to_compare(logits)
        return logits if rows is None else self._compare(state, images, logits, rows)

    def _test_estimate(self, state: ModelState, images: Tensor, logits: Tensor, source: Tensor | None = None) -> bool:
        """Let the estimate look at a batch; return whether it did and is calibrated, so that it may decide."""
        watch, test = self._watch, self.estimate_test
        closely = self.frozen or test.is_open
        if watch is None or not watch.observe(state, images, logits, closely=closely, source=source):
            return False
        if watch.home.known:
            test.add(watch.accuracies(max(len(images), _RECENT)), len(images))
        return watch.home.known

    def _estimated(self) -> str:
        difference = 0.0 if self._watch is None else self._watch.accuracies().difference
        return f"an estimated difference of {100 * difference:+.1f} points to the source model"

    def _adapt(self, state: ModelState, images: Tensor) -> Tensor:
        """Let the model predict and adapt; undo a step after which something is not finite."""
        if self.policy.paused:
            return self._finite(state, images, _predict(state, images, "paused: the stream shows too few classes"))
        self._buffer.copy(state)
        try:
            logits = state.method(images)
        except BaseException:
            state.put_back(self._buffer.state())
            raise
        if is_finite_after_step(state.method, logits):
            return logits
        state.put_back(self._buffer.state())
        self._record("undo", "logits, loss or parameters were not finite after the step")
        overflow = (~self.source(images).isfinite().all(dim=1)).nonzero()[:, 0].tolist()
        if overflow:
            raise NoFiniteAnswer(overflow)
        return self._finite(state, images, _predict(state, images, "the step was undone: something was not finite"))

    def _finite(self, state: ModelState, images: Tensor, logits: Tensor) -> Tensor:
        return logits if all_finite([logits]) else self._escalate(state, images, "the model's output is not finite")

    def _rows_to_compare(self, logits: Tensor) -> Tensor | None:
        """Return the rows of this batch that the source model predicts, too: all, some, or None."""
        count, device, unusual = len(logits), logits.device, self.comparison.observe_adapted(logits)
        fresh = self.rows_compared < _FRESH or self._is_on_trial(logits)
        if fresh or unusual or self.comparison.is_suspicious or not self.comparison.is_shuffled:
            return torch.arange(count, device=device)
        if self.batches_since_comparison < self.settings.compare_every:
            return None
        some = min(count, max(SMALL_BATCH, math.ceil(self.settings.compare_share * count)))
        first = self.batches % max(1, count // some)
        return (torch.arange(some, device=device) * count // some + first).clamp(max=count - 1)

    def _compare(self, state: ModelState, images: Tensor, logits: Tensor, rows: Tensor) -> Tensor:
        """Compare with the source model and act on the result; return the logits to serve."""
        source = self.source(images[rows])
        before, on_trial = self.comparison.is_shuffled, self._is_on_trial(images)
        signals = self.comparison.compare(source, logits[rows], _stability(state, images))
        same_stream = before or not signals.shuffled
        self.rows_compared = self.rows_compared + len(rows) if same_stream else 0  # a new stream is compared closely
        self.report["guard"]["signals"] = asdict(signals) | _adaptation_facts(state)
        logits = self._handle_few_classes(state, images, logits, signals)
        self.batches_since_comparison = 0
        if on_trial:
            logits = self._answer_with_source_on_trial(source, signals)
        if signals.lost > self.settings.limit:
            return self._escalate(state, images, f"about {signals.lost:.1f} predictions lost to adaptation", signals)
        if signals.lost > self.settings.limit / 2:
            self._record("suspect", f"about {signals.lost:.1f} predictions lost; the source model predicts", signals)
            return self._serve_source(source if len(rows) == len(images) else self.source(images))
        healthy = not self.comparison.is_suspicious and not self.comparison.has_few_classes
        if healthy and self.rows_compared >= _FRESH and self.batches_since_save >= _SAVE_EVERY:
            return self._save_healthy_state(state, images, logits)
        return logits

    def _is_on_trial(self, batch: Tensor) -> bool:
        """Say whether the source model predicts the batch because it is small."""
        return self.small_batch_trial.covers(len(batch), fresh=self.comparison.rows < SMALL_BATCH)

    def _answer_with_source_on_trial(self, source: Tensor, signals: ComparisonResult) -> Tensor:
        """Serve the source model for a small batch and count what the adapted model would have lost."""
        action = self.small_batch_trial.count(signals.rows, signals.regret)
        if action is not None:
            self._record(action, REASONS[action], signals)
        return self._serve_source(source)

    def _handle_few_classes(
        self, state: ModelState, images: Tensor, logits: Tensor, signals: ComparisonResult
    ) -> Tensor:
        """Discard what was learned in a long run of few classes; return the logits to serve."""
        rows, comparison = len(images) * max(1, self.batches_since_comparison), self.comparison
        few_classes, more = comparison.has_few_classes, comparison.adapted_has_more_classes
        action = self.policy.count_few_class_rows(few_classes, more, rows)
        if action is None:
            return logits
        self._record(action, f"{REASONS[action]} (about {signals.classes:.1f} classes in the last images)", signals)
        if action == "resume":
            return logits
        state.put_back(self.healthy.state() if self.healthy.exists else None)
        comparison.clear_loss()
        if action == "pause" and not self.healthy.exists:
            self.policy.serve_source()
            self.rows_compared = 0
            return self._serve_source(self.source(images))
        return self._finite(state, images, _predict(state, images, f"{action}: {REASONS[action]}"))

    def _save_healthy_state(self, state: ModelState, images: Tensor, logits: Tensor) -> Tensor:
        """Copy a state that nothing speaks against, for a later rollback."""
        self._buffer.copy(state)
        if not all_finite(self._buffer.state().values()):
            return self._escalate(state, images, "a memory or a statistic is not finite")
        self.healthy.save(self._buffer.state())
        self.batches_since_save = 0
        return logits

    def _escalate(self, state: ModelState, images: Tensor, why: str, signals: ComparisonResult | None = None) -> Tensor:
        """Take the mildest action after which this batch is predicted about as well as by the source model."""
        source, logits, action = self.source(images), None, FREEZE
        slowly = signals is not None and signals.lost > self.comparison.lost
        for action in self.policy.escalate(self.healthy.exists, slowly):
            state.put_back(self.healthy.state() if action == ROLL_BACK else None)
            if action == FREEZE:
                break
            logits = _predict(state, images, f"{action}: {REASONS[action]}")
            if all_finite([logits]) and self._is_acceptable(source, logits, _stability(state, images)):
                break
        if action != ROLL_BACK:
            self.healthy.clear()
            self.small_batch_trial.restart()
        self._start_over()
        self.rows_compared = self.batches_since_save = 0
        self._record(action, f"{why}; {REASONS[action]}", signals)
        return self._serve_source(source) if action == FREEZE or logits is None else logits

    def _start_over(self) -> None:
        """Forget what is known about the adapted model: it was replaced."""
        self.comparison.restart()
        self.estimate_test.clear()
        if self._watch is not None:
            self._watch.clear()

    def _is_acceptable(self, source: Tensor, logits: Tensor, test_stability: Callable[[], Tensor]) -> bool:
        """Say whether a state does well enough on one batch."""
        result = SourceComparison(self.settings).compare(source, logits, test_stability)
        return result.lost <= self.settings.limit / 2

    def _answer_while_frozen(self, state: ModelState, images: Tensor) -> Tensor:
        """Serve the source model; after the wait, try the reset model, less often in a stream that is not shuffled."""
        source = self.source(images)
        if self._watch is not None and self._watch.home.known:
            self.comparison.observe_source(source)
            self._test_estimate(state, images, _predict(state, images, "trial"), source)
            if self.estimate_test.shows_gain(self.policy.freezes):
                self.policy.unfreeze()
                self._record("unfreeze", f"{self._estimated()}: {REASONS['unfreeze']}")
                self._start_over()
            state.method.facts = {"updated": False, "reason": "frozen: the source model predicts"}
            return self._serve_source(source)
        self.batches_since_comparison += 1
        seldom = self.batches_since_comparison < self.settings.compare_every and not self.comparison.is_shuffled
        if self.policy.rows_to_wait > 0 or seldom:
            self.comparison.observe_source(source)
        else:
            self.batches_since_comparison = 0
            self._run_trial(state, images, source)
        state.method.facts = {"updated": False, "reason": "frozen: the source model predicts"}
        return self._serve_source(source)

    def _run_trial(self, state: ModelState, images: Tensor, source: Tensor) -> None:
        """Compare the reset model with the source model; it has to do well for a while, in a shuffled stream."""
        logits = _predict(state, images, "trial")
        signals = self.comparison.compare(source, logits, _stability(state, images))
        self.rows_compared = self.rows_compared + len(images) if signals.shuffled else 0
        self.trial_regret = self.trial_regret + len(images) * signals.regret if signals.shuffled else 0.0
        done = self.rows_compared >= TRIAL_ROWS
        if done and self.trial_regret <= 0:
            self.policy.unfreeze()
            self._record("unfreeze", REASONS["unfreeze"], signals)
        elif done or not signals.lost <= self.settings.limit / 2:
            self.policy.freeze()
        else:
            return
        self.comparison.restart()
        self.rows_compared, self.batches_since_save, self.trial_regret = 0, 0, 0.0

    def _serve_source(self, source: Tensor) -> Tensor:
        self.report["guard"]["answered_by"] = "source"
        return source

    def _record(self, action: str, reason: str, signals: ComparisonResult | None = None, times: int = 1) -> None:
        self.report["guard"] |= {"action": action, "reason": reason}
        self.event_log.record(GuardEvent(self.batches, action, reason, signals), times)

    def _no_logits(self, images: Tensor) -> Tensor:
        """Return logits without a row, in the right width: no image of the batch is valid."""
        width = self.source(torch.zeros_like(images[:1])).shape[1]
        return images.new_zeros(0, width)

    def _for_all_rows(self, logits: Tensor, refused: Mapping[int, str], count: int) -> Tensor:
        """Return logits for the whole batch; excluded images get zeros and an entry in the report."""
        answer = refused_as_zeros(logits, refused, count)
        bad = dict(refused)
        if self.report["guard"]["answered_by"] == "source" and not all_finite([answer]):
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


def _stability(state: ModelState, images: Tensor) -> Callable[[], Tensor]:
    """Return a function that tells which predictions of a batch are stable in a larger one; it costs a pass."""
    return lambda: stable_in_larger_batch(state.method.predict, images)


def _predict(state: ModelState, images: Tensor, reason: str) -> Tensor:
    """Predict with the adapted model, change nothing, and record why it was not adapted."""
    state.method.facts = {"updated": False, "reason": reason}
    return state.method.predict(images).detach()


def _adaptation_facts(state: ModelState) -> dict[str, float | None]:
    """Return the drift from the source weights, and the share of samples that the method learns from."""
    share = state.method.facts.get("selected", state.method.facts.get("confident"))
    return {"drift": relative_change(state.trained()), "selected": None if share is None else float(share)}
