"""Events of the guard: what it can do, and what it did."""

from dataclasses import dataclass

from dpl.estimate import Comparison

__all__ = ["ACTIONS", "GuardEvent"]

ACTIONS = {
    "set_aside": "an image has a value that is not finite or too large: excluded, the others are predicted without it",
    "not_learnt": "a constant frame or a further copy of an image: the source model predicts it, nothing is learned",
    "undo": "logits, loss or weights are not finite after the update: the state before it is restored",
    "freeze": "adaptation has cost too many predictions: the source model predicts, and the state is put back",
    "unfreeze": "the adapted model is better again, or has waited long enough: it predicts and adapts",
}


@dataclass(frozen=True)
class GuardEvent:
    """One action of the guard."""

    batch: int  # counted from 1
    action: str  # one of ACTIONS
    reason: str
    signals: Comparison | None = None

    @property
    def alarm(self) -> bool:
        """Say whether the event deserves attention."""
        return self.action == "freeze"
