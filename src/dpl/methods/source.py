"""The source model, unchanged: the bar that every method has to clear.

Updates: nothing. Needs: nothing. Output: the network's own logits with its running statistics.
"""

from dpl.methods.base import Method
from dpl.methods.registry import register
from dpl.methods.settings import Settings

__all__ = ["SourceModel"]


@register("source", paper="the model as shipped", updates="nothing", passes="1 forward")
class SourceModel(Method[Settings]):
    """Predict only."""
