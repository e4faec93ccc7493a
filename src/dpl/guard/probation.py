"""Small batches: the source answers them until a young model has shown that it does better.

The statistics of two or three images say little, and what one such batch tells about the adapted model is little too:
before the usual signals speak up, one answer in a hundred is lost. So a fresh model whose first batch has under
`SMALL` rows goes on learning from such batches, but its answers stay beside the source's until, over at least `TRIAL`
rows of them, it would have gained: `_GAIN` of the answers, as estimated by dpl.guard.health. An estimate about zero is
no proof; a model that answers like the source, or hardly better, loses nothing by staying beside it. Larger batches
are not concerned, nor are small ones after larger: the rest of a stream is no stream of its own.
"""

import math

from dpl.core.state import Stateful

__all__ = ["SMALL", "TRIAL", "Probation"]

SMALL = 8  # rows below which a batch is small
TRIAL = 512  # rows that a model which is not trusted has to answer well beside the source
_GAIN = 0.01


class Probation(Stateful):
    """Whether the answers to small batches are still the source's."""

    started: int
    passed: int
    rows: int  # of small batches seen meanwhile
    owed: float  # estimated answers lost in them, and the gain that is asked for

    def __init__(self) -> None:
        super().__init__()
        self.declare(started=0, passed=0, rows=0, owed=0.0)

    def covers(self, rows: int, fresh: bool) -> bool:
        """Say whether a batch of so many rows is the source's to answer; only a fresh model can be put on probation."""
        return rows < SMALL and not self.passed and (fresh or bool(self.started))

    def count(self, rows: int, regret: float) -> str | None:
        """Count a small batch; return what begins ("stand_back") or ends ("trust") with it, or nothing."""
        begins, self.started = not self.started, 1
        if math.isfinite(regret):  # a source that overflows says nothing
            self.rows, self.owed = self.rows + rows, self.owed + rows * (regret + _GAIN)
        self.passed = int(self.rows >= TRIAL and self.owed <= 0)
        return "stand_back" if begins else "trust" if self.passed else None

    def restart(self) -> None:
        """Forget everything: the model was put back and has to be tried anew."""
        self.started, self.passed, self.rows, self.owed = 0, 0, 0, 0.0
