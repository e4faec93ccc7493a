"""RPL: robust pseudo-labelling with the generalised cross-entropy.

Rusak et al., If your data distribution shifts, use self-learning, TMLR 2022.

    y_i = argmax_c p_ic,    L = mean_i (1 - p_i[y_i]^q) / q,    q = 0.8

The gradient of a sample is that of the cross-entropy times p_i[y_i]^q, so uncertain samples count less: q -> 0 is the
cross-entropy, q = 1 the probability of a wrong label. Updates: affine parameters of normalisation layers, with batch
statistics. Needs: such layers. Output: from before the update. Adam 1e-3 is the RMT library's choice for CIFAR; for
ImageNet it is SGD with Nesterov's momentum and 5e-4. Departure: the network is in evaluation mode (no dropout).
"""

from dataclasses import dataclass

from dpl.core.numerics import at_least_float32
from dpl.core.settings import setting
from dpl.methods.base import GradientMethod, Objective
from dpl.methods.registry import register
from dpl.methods.settings import GradientSettings
from dpl.network import Pass

__all__ = ["RPL", "RPLSettings"]


@dataclass(frozen=True, kw_only=True)
class RPLSettings(GradientSettings, norm="batch"):
    """Settings of RPL."""

    q: float = setting(0.8, "how much less uncertain samples count", low=1e-3, high=1)


@register(
    "rpl",
    paper="Rusak et al., If your data distribution shifts, use self-learning, TMLR 2022",
    updates="affine parameters of normalisation layers",
    passes="1 forward, 1 backward",
)
class RPL(GradientMethod[RPLSettings]):
    """Generalised cross-entropy on the model's own labels."""

    settings_class = RPLSettings

    def loss(self, out: Pass) -> Objective:
        """Mean generalised cross-entropy."""
        labels = out.reference.argmax(dim=1, keepdim=True)
        chosen = at_least_float32(out.logits).softmax(dim=1).gather(1, labels)
        return Objective(((1 - chosen**self.settings.q) / self.settings.q).mean())
