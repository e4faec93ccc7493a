"""The guard: stands between the images and an adapting model, and answers with the source where that is safer.

For every batch: rows that cannot be trusted are set aside; a step after which something is not finite is undone; every
few batches a few rows are also shown to a frozen copy of the source network, and if adaptation loses answers against
it (dpl.guard.health) the guard climbs its ladder (dpl.guard.policy): back to the last healthy state, back to the
source, or freeze: serve the source and try again later. It knows no method, only states and predictions.

Memory: one copy of the source's weights, and two of what adaptation changes (before the step; last healthy).
"""

import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn

from dpl.core.state import Stateful
from dpl.guard.events import Event, Journal
from dpl.guard.health import Health, Signals
from dpl.guard.inputs import RowCheck, Unanswerable, rows_or_zeros, spread, without
from dpl.guard.policy import FREEZE, ROLL_BACK, WHY, Ladder
from dpl.guard.probation import SMALL, TRIAL, Probation
from dpl.guard.settings import GuardSettings
from dpl.guard.state_copy import Before, KeptState, Ward, all_finite
from dpl.network.copying import private_copy
from dpl.network.split import logits_of

__all__ = ["Guard"]

_FRESH = 128  # rows that are all looked at after a start, a reset or a thaw
_KEEP_EVERY = 16  # batches between copies of a healthy state


class Guard(Stateful):
    """Watches one adapting model; made by `dpl.adapt(..., guard=True)` and found at `model.guard`."""

    batches: int
    looked: int  # rows looked at since the last (re)start
    unlooked: int  # batches since the last look
    unkept: int  # batches since the last copy of a healthy state
    owed: float  # estimated answers lost in a trial, allowance included

    def __init__(self, settings: GuardSettings, model: nn.Module) -> None:
        super().__init__()
        self.settings = settings
        self._source = private_copy(model).eval().requires_grad_(False)
        self.declare(batches=0, looked=0, unlooked=0, unkept=0, owed=0.0)
        self.rows, self.health, self.ladder = RowCheck(settings), Health(settings), Ladder(settings)
        self.journal, self.healthy, self.probation = Journal(settings.log), KeptState(), Probation()
        for name in ("rows", "health", "ladder", "journal", "healthy", "probation"):
            self.declare_part(name, getattr(self, name))
        self._before = Before()
        self.report: dict[str, Any] = {}

    @property
    def frozen(self) -> bool:
        """Say whether the source answers instead of the adapted model."""
        return bool(self.ladder.frozen)

    @property
    def counts(self) -> dict[str, int]:
        """How often each action was taken."""
        return self.journal.counts

    @property
    def events(self) -> deque[Event]:
        """The latest events, oldest first."""
        return self.journal.events

    def call_on_event(self, callback: Callable[[Event], None] | None) -> None:
        """Call a function with every event from now on (None: nobody)."""
        self.journal.on_event = callback

    def move(self, transfer: Callable[[Tensor], Tensor]) -> None:
        """Take the source network along to another device or type."""
        self._source._apply(transfer)  # type: ignore[no-untyped-call]
        self._before = Before()
        super().move(transfer)

    def step(self, images: Tensor, reins: Callable[[Tensor], Ward]) -> Tensor:
        """Answer a batch and let the model adapt to it, as far as both are safe; `reins` gets the good rows first."""
        examined = self.rows.examine(images)
        refused = dict(examined.refused)
        kept = without(images, refused)
        ward = reins(kept if len(kept) else torch.zeros_like(images[:1]))
        self.report = {"guard": {"action": "none", "reason": "", "answered_by": "adapted", "signals": None}}
        self.batches += 1
        if len(kept) == 0:
            return self._with_set_aside(self._blank(images), refused, len(images))
        self.rows.learn(examined)
        self.ladder.let_pass(len(kept))
        try:
            logits = self._serve(ward, kept)
        except Unanswerable as overflow:
            places = [row for row in range(len(images)) if row not in refused]
            refused |= {places[i]: "the source network itself gives no finite answer" for i in overflow.rows}
            kept = without(images, refused)
            logits = self._serve(ward, kept) if len(kept) else self._blank(images)
        return self._with_set_aside(logits, refused, len(images))

    @torch.no_grad()
    def predict(self, images: Tensor, reins: Callable[[Tensor], Ward]) -> Tensor:
        """Answer a batch and change nothing."""
        refused = self.rows.examine(images).refused
        kept = without(images, refused)
        ward = reins(kept if len(kept) else torch.zeros_like(images[:1]))
        if len(kept) == 0:
            return spread(self._blank(images), refused, len(images))
        by_source = self.frozen or self._on_probation(kept)
        logits = self.source(kept) if by_source else ward.method.predict(kept).detach()
        if not all_finite([logits]):
            logits = self.source(kept)
        return spread(rows_or_zeros(logits), refused, len(images))

    @torch.no_grad()
    def source(self, images: Tensor) -> Tensor:
        """Return the logits of the frozen source network."""
        return logits_of(self._source(images))

    def _serve(self, ward: Ward, images: Tensor) -> Tensor:
        if self.frozen:
            return self._while_frozen(ward, images)
        logits = self._adapt(ward, images)
        self.unlooked += 1
        self.unkept += 1
        rows = self._rows_to_look_at(logits)
        return logits if rows is None else self._look(ward, images, logits, rows)

    def _adapt(self, ward: Ward, images: Tensor) -> Tensor:
        """Let the model act; what is not finite is not committed."""
        if self.ladder.holding:
            return self._finite(ward, images, ward.predict(images, "held: the stream shows too few classes"))
        self._before.take(ward)
        try:
            logits = ward.act(images)
        except BaseException:
            ward.put_back(self._before.state())
            raise
        if ward.is_finite(logits):
            return logits
        ward.put_back(self._before.state())
        self._note("undo", "logits, loss or parameters were not finite after the step")
        overflow = (~self.source(images).isfinite().all(dim=1)).nonzero()[:, 0].tolist()
        if overflow:
            raise Unanswerable(overflow)
        return self._finite(ward, images, ward.predict(images, "the step was undone: something was not finite"))

    def _finite(self, ward: Ward, images: Tensor, logits: Tensor) -> Tensor:
        return logits if all_finite([logits]) else self._climb(ward, images, "the state gives no finite answers")

    def _rows_to_look_at(self, logits: Tensor) -> Tensor | None:
        """Return the rows of this batch to show to the source too: all, some, or None."""
        count, device, surprise = len(logits), logits.device, self.health.surprised_by(logits)
        young = self.looked < _FRESH or self._on_probation(logits)
        if young or surprise or self.health.uneasy or not self.health.shuffled:
            return torch.arange(count, device=device)
        if self.unlooked < self.settings.compare_every:
            return None
        some = min(count, max(SMALL, math.ceil(self.settings.compare_share * count)))
        first = self.batches % max(1, count // some)
        return (torch.arange(some, device=device) * count // some + first).clamp(max=count - 1)

    def _look(self, ward: Ward, images: Tensor, logits: Tensor, rows: Tensor) -> Tensor:
        """Compare with the source and act on it; return the answer."""
        source = self.source(images[rows])
        before, on_probation = self.health.shuffled, self._on_probation(images)
        signals = self.health.judge(source, logits[rows], lambda: ward.answers_kept(images))
        self.looked = self.looked + len(rows) if before or not signals.shuffled else 0  # look closely at a new stream
        self.report["guard"]["signals"] = asdict(signals) | ward.facts()
        logits = self._mind_the_classes(ward, images, logits, signals)
        self.unlooked = 0
        if on_probation:
            logits = self._stay_beside(source, signals)
        if signals.lost > self.settings.limit:
            return self._climb(ward, images, f"about {signals.lost:.1f} answers lost to adaptation", signals)
        if signals.lost > self.settings.limit / 2:
            self._note("suspect", f"about {signals.lost:.1f} answers lost; the source answers", signals)
            return self._answer_with(source if len(rows) == len(images) else self.source(images))
        if not self.health.uneasy and not self.health.poor and self.looked >= _FRESH and self.unkept >= _KEEP_EVERY:
            return self._keep_if_finite(ward, images, logits)
        return logits

    def _on_probation(self, batch: Tensor) -> bool:
        """Say whether a batch is so small that the source answers it, until the model is known better."""
        return self.probation.covers(len(batch), fresh=self.health.rows < SMALL)

    def _stay_beside(self, source: Tensor, signals: Signals) -> Tensor:
        """Answer a small batch with the source and count what the adapted model would have lost."""
        change = self.probation.count(signals.rows, signals.regret)
        if change is not None:
            self._note(change, WHY[change], signals)
        return self._answer_with(source)

    def _mind_the_classes(self, ward: Ward, images: Tensor, logits: Tensor, signals: Signals) -> Tensor:
        """Keep nothing of what a long stretch of few classes taught; return the answer."""
        rows = len(images) * max(1, self.unlooked)
        change = self.ladder.see_classes(self.health.poor, self.health.enriched, rows)
        if change is None:
            return logits
        self._note(change, f"{WHY[change]} (about {signals.classes:.1f} classes in the last rows)", signals)
        if change == "release":
            return logits
        ward.put_back(self.healthy.state() if self.healthy.exists else None)
        self.health.forgive()
        if change == "hold" and not self.healthy.exists:
            self.ladder.stand_back()
            self.looked = 0
            return self._answer_with(self.source(images))
        return self._finite(ward, images, ward.predict(images, f"{change}: {WHY[change]}"))

    def _keep_if_finite(self, ward: Ward, images: Tensor, logits: Tensor) -> Tensor:
        """Copy a state that nothing speaks against, as the one to go back to."""
        self._before.take(ward)
        if not all_finite(self._before.state().values()):
            return self._climb(ward, images, "a memory or a statistic is not finite")
        self.healthy.keep(self._before.state())
        self.unkept = 0
        return logits

    def _climb(self, ward: Ward, images: Tensor, why: str, signals: Signals | None = None) -> Tensor:
        """Go back as far as needed for this batch to be answered as well as by the source."""
        source, logits, rung = self.source(images), None, FREEZE
        slowly = signals is not None and signals.lost > self.health.lost
        for rung in self.ladder.climb(self.healthy.exists, slowly):
            ward.put_back(self.healthy.state() if rung == ROLL_BACK else None)
            if rung == FREEZE:
                break
            logits = ward.predict(images, f"{rung}: {WHY[rung]}")
            if all_finite([logits]) and self._passes(source, logits, lambda: ward.answers_kept(images)):
                break
        if rung != ROLL_BACK:
            self.healthy.drop()
            self.probation.restart()
        self.health.restart()
        self.looked = self.unkept = 0
        self._note(rung, f"{why}; {WHY[rung]}", signals)
        return self._answer_with(source) if rung == FREEZE or logits is None else logits

    def _passes(self, source: Tensor, logits: Tensor, ask: Callable[[], Tensor]) -> bool:
        """Say whether a state does well enough on one batch by itself."""
        return Health(self.settings).judge(source, logits, ask).lost <= self.settings.limit / 2

    def _while_frozen(self, ward: Ward, images: Tensor) -> Tensor:
        """Serve the source; after the wait, try the reset model beside it, now and then in a stream of few classes."""
        source = self.source(images)
        self.unlooked += 1
        if self.ladder.waiting > 0 or (self.unlooked < self.settings.compare_every and not self.health.shuffled):
            self.health.watch(source)
        else:
            self.unlooked = 0
            self._try(ward, images, source)
        ward.method.facts = {"updated": False, "reason": "frozen: the source answers"}
        return self._answer_with(source)

    def _try(self, ward: Ward, images: Tensor, source: Tensor) -> None:
        """Judge the reset model beside the source; it has to do well for a while, in a stream it can learn from."""
        signals = self.health.judge(source, ward.predict(images, "trial"), lambda: ward.answers_kept(images))
        self.looked = self.looked + len(images) if signals.shuffled else 0
        self.owed = self.owed + len(images) * signals.regret if signals.shuffled else 0.0
        done = self.looked >= TRIAL
        if done and self.owed <= 0:
            self.ladder.thaw()
            self._note("thaw", WHY["thaw"], signals)
        elif done or not signals.lost <= self.settings.limit / 2:
            self.ladder.freeze()
        else:
            return
        self.health.restart()
        self.looked, self.unkept, self.owed = 0, 0, 0.0

    def _answer_with(self, source: Tensor) -> Tensor:
        self.report["guard"]["answered_by"] = "source"
        return source

    def _note(self, action: str, reason: str, signals: Signals | None = None, times: int = 1) -> None:
        self.report["guard"] |= {"action": action, "reason": reason}
        self.journal.note(Event(self.batches, action, reason, signals), times)

    def _blank(self, images: Tensor) -> Tensor:
        """Return the answer to a batch of which nothing can be used: no row of the right width."""
        width = self.source(torch.zeros_like(images[:1])).shape[1]
        return images.new_zeros(0, width)

    def _with_set_aside(self, logits: Tensor, refused: Mapping[int, str], count: int) -> Tensor:
        """Put the answers in their places; rows without one get zeros (every class alike) and an entry."""
        answer = spread(logits, refused, count)
        bad = dict(refused)
        if self.report["guard"]["answered_by"] == "source" and not all_finite([answer]):
            broken = (~answer.isfinite().all(dim=1)).nonzero()[:, 0].tolist()
            bad |= dict.fromkeys(broken, "the source network itself gives no finite answer")
            answer = rows_or_zeros(answer)
        self.report["set_aside"] = bad
        if bad:
            row, why = next(iter(bad.items()))
            self._note("set_aside", f"{len(bad)} of {count} rows, e.g. {row}: {why}", times=len(bad))
        if len(bad) == count:
            self.report |= {"updated": False, "reason": "every row was set aside"}
        return answer
