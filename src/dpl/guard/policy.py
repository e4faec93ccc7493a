"""Rules of the guard: escalation from a rollback to a freeze, pauses in streams with few classes, small batches.

The statistics of two or three images are poor estimates, and one such batch shows little about the adapted model:
one prediction in a hundred is lost before the comparison notices. So if the first batch of a fresh model has under
`SMALL_BATCH` images, the model adapts to such batches, but the source model predicts them. This trial ends once the
adapted model would have gained `_GAIN` of the predictions over at least `TRIAL_ROWS` images. An estimate near zero is
no evidence, and a model that is hardly better loses nothing by the trial. Larger batches are not concerned, nor are
small batches after larger ones, such as the last batch of a stream.
"""

import math
from collections.abc import Iterator

from dpl.core.state import Stateful
from dpl.guard.settings import GuardSettings

__all__ = [
    "FREEZE", "REASONS", "RESET", "ROLL_BACK", "SMALL_BATCH", "TRIAL_ROWS", "EscalationPolicy", "SmallBatchTrial",
]  # fmt: skip

SMALL_BATCH = 8  # a batch with fewer images is small
TRIAL_ROWS = 512  # images over which an untrusted model is compared with the source model
_GAIN = 0.01  # of the predictions
_MOST_DOUBLINGS = 6
_SLOW_DOUBLINGS = 3  # a model that forgets slowly will do so again, and it takes long to see
_HYSTERESIS = 4  # a freeze is forgotten after this many times `forget_after`

ROLL_BACK, RESET, FREEZE = "roll_back", "reset", "freeze"
_LEVELS = (ROLL_BACK, RESET, FREEZE)
REASONS = {
    "pause": "too few classes to adapt to: the last healthy state, or else the source model, predicts without adapting",
    "resume": "enough classes again: adaptation resumes",
    "discard": "a long run of few classes ended: back to the last healthy state",
    ROLL_BACK: "back to the last healthy state",
    RESET: "back to the source model",
    FREEZE: "the source model predicts until adaptation passes a trial",
    "unfreeze": "adaptation passed its trial and resumes from the source model",
    "trial_started": (
        f"batches under {SMALL_BATCH} images: the source model predicts until the adapted model is at least "
        f"{100 * _GAIN:.0f} % better over {TRIAL_ROWS} images"
    ),
    "trial_passed": "adaptation passed its trial on small batches: the adapted model predicts them from now on",
}


class EscalationPolicy(Stateful):
    """Takes a stronger action if trouble returns soon, and forgets old trouble.

    A fresh model counts as just reset: if it fails at once, its state is not to blame, and it is frozen.
    """

    level: int  # the last action that is still remembered: 0 none, 1 rollback, 2 reset or freeze
    quiet_rows: int  # images since the last trouble
    frozen: int
    rows_to_wait: int  # images before a frozen model is tried again
    freezes: int  # freezes that are remembered; each doubles the wait
    few_class_run: int  # images of the present run of few classes
    paused: int

    def __init__(self, settings: GuardSettings) -> None:
        super().__init__()
        self.settings = settings
        self.declare(level=2, quiet_rows=0, frozen=0, rows_to_wait=0, freezes=0, few_class_run=0, paused=0)

    def count_rows(self, rows: int) -> None:
        """Count the images of a batch; forget trouble that is long ago."""
        self.quiet_rows += rows
        self.rows_to_wait = max(0, self.rows_to_wait - rows)
        if self.quiet_rows >= self.settings.forget_after and not self.frozen:
            self.level = 0
            if self.quiet_rows >= _HYSTERESIS * self.settings.forget_after:
                self.freezes = 0

    def escalate(self, has_healthy_state: bool, slowly: bool = False) -> Iterator[str]:
        """Yield the actions to try, mildest first; the one at which the caller stops is the one taken.

        A freeze lasts longer if the predictions were lost `slowly`.
        """
        for number, action in enumerate(_LEVELS, start=1):
            if number > self.level and (action != ROLL_BACK or has_healthy_state):
                self.level, self.quiet_rows = min(number, 2), 0
                if action == FREEZE:
                    self.freeze(slowly)
                yield action

    def freeze(self, slowly: bool = False) -> None:
        """Wait before the model is tried again, each time twice as long."""
        self.frozen, self.paused, self.few_class_run, self.quiet_rows = 1, 0, 0, 0
        self.freezes += _SLOW_DOUBLINGS if slowly else 0
        self.rows_to_wait = self.settings.freeze_rows * 2 ** min(self.freezes, _MOST_DOUBLINGS)
        self.freezes += 1

    def serve_source(self) -> None:
        """Let the source model predict without an alarm; the adapted model may be tried at once."""
        self.frozen, self.paused, self.few_class_run, self.rows_to_wait = 1, 0, 0, 0

    def unfreeze(self) -> None:
        """Let the model predict and adapt again; the next failure freezes it again."""
        self.frozen, self.quiet_rows, self.level = 0, 0, 2

    def count_few_class_rows(self, few_classes: bool, adapted_has_more: bool, rows: int) -> str | None:
        """Count the images of a run of few classes; return the action due: "pause", "resume", "discard" or None.

        Adaptation is paused once the run is too long, unless the adapted model sees more classes (then the source
        model may be wrong about the run). What was learned in a long run is discarded when it ends.
        """
        long = self.few_class_run > self.settings.few_class_rows
        self.few_class_run = self.few_class_run + rows if few_classes else 0
        if self.paused:
            self.paused = int(few_classes)
            return None if few_classes else "resume"
        if long and few_classes and not adapted_has_more:
            self.paused = 1
            return "pause"
        return "discard" if long and not few_classes else None


class SmallBatchTrial(Stateful):
    """Decides whether the source model still predicts small batches."""

    started: int
    passed: int
    rows: int  # images of small batches during the trial
    regret: float  # estimated predictions lost in them, plus the gain that is required

    def __init__(self) -> None:
        super().__init__()
        self.declare(started=0, passed=0, rows=0, regret=0.0)

    def covers(self, rows: int, fresh: bool) -> bool:
        """Say whether the source model predicts a batch of this size; a trial starts with a fresh model only."""
        return rows < SMALL_BATCH and not self.passed and (fresh or bool(self.started))

    def count(self, rows: int, regret: float) -> str | None:
        """Count a small batch; return the action that is due: "trial_started", "trial_passed" or None."""
        begins, self.started = not self.started, 1
        if math.isfinite(regret):  # a source model that overflows is no reference
            self.rows, self.regret = self.rows + rows, self.regret + rows * (regret + _GAIN)
        self.passed = int(self.rows >= TRIAL_ROWS and self.regret <= 0)
        return "trial_started" if begins else "trial_passed" if self.passed else None

    def restart(self) -> None:
        """Start over: the model was reset and has to pass the trial again."""
        self.started, self.passed, self.rows, self.regret = 0, 0, 0, 0.0
