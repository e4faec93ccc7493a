"""The guard, which protects any method: invalid images excluded, broken steps undone, harm noticed and ended.

It compares the adapted model with the frozen source model (comparison) and acts on the result (policy, guard). It knows
predictions and states, and must not know a particular method.
"""

from dpl.guard.comparison import ComparisonResult
from dpl.guard.events import GuardEvent
from dpl.guard.guard import Guard
from dpl.guard.settings import GuardSettings, guard_settings

__all__ = ["ComparisonResult", "Guard", "GuardEvent", "GuardSettings", "guard_settings"]
