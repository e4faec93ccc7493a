"""The guard, which protects any method: invalid images excluded, broken steps undone, harm noticed and ended.

It sums up what comparisons with the frozen source model say (evidence) and acts on it (guard). It knows predictions and
states, and must not know a particular method.
"""

from dpl.guard.events import GuardEvent
from dpl.guard.guard import Guard
from dpl.guard.settings import GuardSettings

__all__ = ["Guard", "GuardEvent", "GuardSettings"]
