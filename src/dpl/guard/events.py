"""What the guard did: counted, logged in a bounded list, and told to whoever asked."""

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from dpl.core.state import Stateful
from dpl.guard.health import Signals

__all__ = ["ACTIONS", "Event", "Journal"]

ACTIONS = (
    *("set_aside", "undo", "stand_back", "trust", "hold", "release", "forget"),
    *("suspect", "roll_back", "reset", "freeze", "thaw"),
)
_ALARMS = ("freeze",)
_log = logging.getLogger("dpl.guard")


@dataclass(frozen=True)
class Event:
    """One action of the guard."""

    batch: int  # counted from 1
    action: str  # one of ACTIONS
    reason: str
    signals: Signals | None = None

    @property
    def alarm(self) -> bool:
        """Say whether somebody should look at it."""
        return self.action in _ALARMS


class Journal(Stateful):
    """Counters (part of the model's state), the latest events (not), and a callback (not)."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.declare(**dict.fromkeys(ACTIONS, 0))
        self.events: deque[Event] = deque(maxlen=length)
        self.on_event: Callable[[Event], None] | None = None

    @property
    def counts(self) -> dict[str, int]:
        """How often each action was taken; rows for `set_aside`, batches for the others."""
        return {action: getattr(self, action) for action in ACTIONS}

    def note(self, event: Event, times: int = 1) -> None:
        """Count an event, log it and tell the callback."""
        setattr(self, event.action, getattr(self, event.action) + times)
        self.events.append(event)
        _log.log(
            logging.WARNING if event.alarm else logging.INFO,
            "batch %d: %s: %s",
            event.batch,
            event.action,
            event.reason,
        )
        if self.on_event is not None:
            self.on_event(event)
