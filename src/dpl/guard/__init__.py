"""Safety for any method: bad rows set aside, bad steps undone, harm against the source noticed and ended."""

from dpl.guard.events import Event
from dpl.guard.guard import Guard
from dpl.guard.health import Signals
from dpl.guard.settings import GuardSettings, guard_settings

__all__ = ["Event", "Guard", "GuardSettings", "Signals", "guard_settings"]
