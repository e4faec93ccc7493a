"""What speaks against the adapted model, and for it: two sums of estimated predictions, lost and gained.

Each look adds the estimated difference of its images, less an allowance, and no sum falls below zero (CUSUM). After a
freeze the model has to gain as much as it had lost, and each further freeze doubles that (docs/internals/guard.md).
"""

from dpl.core.state import Stateful
from dpl.estimate import Comparison
from dpl.guard.settings import GuardSettings

__all__ = ["Evidence"]

_MOST_DOUBLINGS = 6


class Evidence(Stateful):
    """Decides when the source model predicts instead of the adapted one."""

    lost: float  # estimated predictions
    gained: float
    frozen: int
    freezes: int  # that are remembered
    rows: int  # images since the last change between the models

    def __init__(self, settings: GuardSettings) -> None:
        super().__init__()
        self.settings = settings
        self.declare(lost=0.0, gained=0.0, frozen=0, freezes=0, rows=0)

    def count(self, rows: int) -> None:
        """Count the images of a batch; forget freezes that are long ago."""
        self.rows += rows
        if not self.frozen and self.rows >= self.settings.forget_after:
            self.freezes = 0

    def add(self, found: Comparison) -> None:
        """Add a look."""
        at_most, at_least = (found.difference + sign * self.settings.allowance for sign in (1, -1))
        self.lost = min(self.settings.limit, max(0.0, self.lost - found.rows * at_most))
        self.gained = max(0.0, self.gained + found.rows * at_least)

    @property
    def shows_harm(self) -> bool:
        """Say whether to freeze."""
        return self.lost >= self.settings.limit

    def shows_gain(self, found: Comparison) -> bool:
        """Say whether the state is worth keeping: it has gained, also in the latest look, and lost nothing."""
        s = self.settings
        return found.difference > s.allowance and self.gained >= s.limit and self.lost == 0

    @property
    def is_suspicious(self) -> bool:
        """Say whether to look closely: a quarter of the limit is lost."""
        return self.lost > self.settings.limit / 4

    @property
    def shows_recovery(self) -> bool:
        """Say whether to unfreeze: a clear gain, or a long wait and nothing suspicious."""
        factor = 2 ** min(self.freezes - 1, _MOST_DOUBLINGS)
        waited = self.rows >= factor * self.settings.freeze_rows
        return self.gained >= factor * self.settings.limit or (waited and not self.is_suspicious)

    def switch(self, frozen: bool) -> None:
        """Let the other model predict."""
        self.frozen, self.lost, self.gained, self.rows = int(frozen), 0.0, 0.0, 0
        self.freezes += int(frozen)
