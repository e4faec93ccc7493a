"""Events of the guard: counted, logged, kept in a bounded list, and passed to a callback."""

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from dpl.core.state import Stateful
from dpl.estimate import Comparison

__all__ = ["ACTIONS", "EventLog", "GuardEvent"]

ACTIONS = {
    "set_aside": "an image has a value that is not finite or too large: excluded, the others are predicted without it",
    "not_learnt": "a constant frame or a further copy of an image: the source model predicts it, nothing is learned",
    "undo": "logits, loss or weights are not finite after the update: the state before it is restored",
    "freeze": "adaptation has cost too many predictions: the source model predicts, and the state is put back",
    "unfreeze": "the adapted model is better again, or has waited long enough: it predicts and adapts",
}
_log = logging.getLogger("dpl.guard")


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


class EventLog(Stateful):
    """Counters, which are part of the model's state; the latest events and a callback, which are not."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.declare(**dict.fromkeys(ACTIONS, 0))
        self.events: deque[GuardEvent] = deque(maxlen=length)
        self.on_event: Callable[[GuardEvent], None] | None = None

    @property
    def counts(self) -> dict[str, int]:
        """How often each action was taken: images for `set_aside` and `not_learnt`, batches for the others."""
        return {action: getattr(self, action) for action in ACTIONS}

    def record(self, event: GuardEvent, times: int = 1) -> None:
        """Count an event, log it and call the callback."""
        setattr(self, event.action, getattr(self, event.action) + times)
        self.events.append(event)
        level = logging.WARNING if event.alarm else logging.INFO
        _log.log(level, "batch %d: %s: %s", event.batch, event.action, event.reason)
        if self.on_event is not None:
            self.on_event(event)
