"""When the guard does what: the ladder from a roll-back to a freeze, and when learning is held."""

from collections.abc import Iterator

from dpl.core.state import Stateful
from dpl.guard.settings import GuardSettings

__all__ = ["FREEZE", "RESET", "ROLL_BACK", "WHY", "Ladder"]

ROLL_BACK, RESET, FREEZE = "roll_back", "reset", "freeze"
_RUNGS = (ROLL_BACK, RESET, FREEZE)
WHY = {
    "hold": "too few classes to learn from: the last healthy state answers and does not learn, or else the source",
    "release": "enough classes again: learning goes on",
    "forget": "a long stretch of few classes ended: back to the last healthy state",
    ROLL_BACK: "back to the last healthy state",
    RESET: "back to the source model",
    FREEZE: "the source answers until adaptation passes a trial",
    "thaw": "adaptation passed its trial and may go on from the source",
    "stand_back": "small batches: the source answers them until adaptation has done no worse on 512 rows of such",
    "trust": "adaptation passed its trial on small batches and answers them from now on",
}
_MOST_DOUBLINGS = 6
_SLOW_DOUBLINGS = 3  # a model that forgets slowly will do so again, and it takes long to see
_HYSTERESIS = 4  # a freeze is forgotten after this many times the rows after which other trouble is


class Ladder(Stateful):
    """Climbs when trouble returns soon, comes down when it stays away.

    A fresh model counts as just reset: if it fails at once, its own state cannot be blamed, and it is frozen.
    """

    rung: int  # the last rung taken, while it is remembered: 0 none, 1 roll-back, 2 reset or freeze
    calm: int  # rows since the last trouble
    frozen: int
    waiting: int  # rows before a frozen model is tried again
    freezes: int  # freezes that are remembered; each doubles the wait
    poor: int  # rows of the present stretch of too few classes
    holding: int

    def __init__(self, settings: GuardSettings) -> None:
        super().__init__()
        self.settings = settings
        self.declare(rung=2, calm=0, frozen=0, waiting=0, freezes=0, poor=0, holding=0)

    def let_pass(self, rows: int) -> None:
        """Count rows that went by; old trouble is forgotten."""
        self.calm += rows
        self.waiting = max(0, self.waiting - rows)
        if self.calm >= self.settings.forget_after and not self.frozen:
            self.rung = 0
            if self.calm >= _HYSTERESIS * self.settings.forget_after:
                self.freezes = 0

    def climb(self, has_healthy_state: bool, slowly: bool = False) -> Iterator[str]:
        """Yield the rungs to try, mildest first; the one at which the caller stops is the one taken.

        What was lost `slowly` makes a freeze last longer.
        """
        for number, rung in enumerate(_RUNGS, start=1):
            if number > self.rung and (rung != ROLL_BACK or has_healthy_state):
                self.rung, self.calm = min(number, 2), 0
                if rung == FREEZE:
                    self.freeze(slowly)
                yield rung

    def freeze(self, slowly: bool = False) -> None:
        """Wait before the model is tried again, each time twice as long."""
        self.frozen, self.holding, self.poor, self.calm = 1, 0, 0, 0
        self.freezes += _SLOW_DOUBLINGS if slowly else 0
        self.waiting = self.settings.freeze_rows * 2 ** min(self.freezes, _MOST_DOUBLINGS)
        self.freezes += 1

    def stand_back(self) -> None:
        """Let the source answer without an alarm; the model may be tried at once."""
        self.frozen, self.holding, self.poor, self.waiting = 1, 0, 0, 0

    def thaw(self) -> None:
        """Let the model answer and learn again; the next failure freezes it again."""
        self.frozen, self.calm, self.rung = 0, 0, 2

    def see_classes(self, poor: bool, enriched: bool, rows: int) -> str | None:
        """Count a poor stretch's rows; return what is due: "hold", "release", "forget" or nothing.

        Learning is held once the stretch has lasted too long, unless adaptation itself makes it richer (then the
        source may have been wrong about it). What was learnt in a long stretch is forgotten when it ends.
        """
        long = self.poor > self.settings.few_class_rows
        self.poor = self.poor + rows if poor else 0
        if self.holding:
            self.holding = int(poor)
            return None if poor else "release"
        if long and poor and not enriched:
            self.holding = 1
            return "hold"
        return "forget" if long and not poor else None
