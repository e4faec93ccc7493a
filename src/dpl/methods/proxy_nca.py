"""Proxy-NCA on confident pseudo-labels: one of the two prototype losses that the DPL paper compares its own with.

Movshovitz-Attias, Toshev, Leung, Ioffe, Singh, No Fuss Distance Metric Learning using Proxies, ICCV 2017.

    L = (1/N) sum over the confident of -log [ exp(-s d(z_i, w_y)) / sum_{k != y} exp(-s d(z_i, w_k)) ]

with d the squared distance of unit vectors, the classifier's rows w_k as proxies and y = argmax p_i. The scale s = 1 is
the original's; all else is as for `pl`.

Updates: all parameters, with the source's running statistics. Needs: a linear classifier of two classes or more.
Output: the ordinary logits W z + b, from before the last update. A batch without a confident sample changes nothing.
"""

from dataclasses import dataclass

from torch import Tensor

from dpl.core.settings import setting
from dpl.methods.base import GradientMethod, Objective
from dpl.methods.registry import register
from dpl.methods.settings import GradientSettings
from dpl.network import Pass
from dpl.objectives import confident_labels
from dpl.objectives.proxy import proxy_nca

__all__ = ["ProxyNCA", "ProxyNCASettings"]


@dataclass(frozen=True, kw_only=True)
class ProxyNCASettings(GradientSettings, lr=5e-5, scope="all"):
    """Settings of Proxy-NCA."""

    confidence: float = setting(0.9, "alpha: samples with a probability above it take part", low=0, high=1)
    scale: float = setting(1.0, "s: multiplies the squared distances", low=1e-4)


@register(
    "proxy_nca",
    paper="Movshovitz-Attias et al., No Fuss Distance Metric Learning using Proxies, ICCV 2017 (as in the DPL paper)",
    updates="all parameters",
    passes="1 forward, 1 forward and backward of the confident",
    needs_classifier=True,
)
class ProxyNCA(GradientMethod[ProxyNCASettings]):
    """Neighbourhood components analysis with the classifier's rows as proxies."""

    settings_class = ProxyNCASettings

    def candidates(self, out: Pass) -> Tensor:
        """The confident samples."""
        return confident_labels(out.reference, self.settings.confidence) >= 0

    def loss(self, out: Pass) -> Objective:
        """Proxy-NCA over the confident."""
        labels = confident_labels(out.reference, self.settings.confidence)
        confident = labels >= 0
        value = proxy_nca(out.z, self.network.prototypes, labels, self.settings.scale)
        return Objective(value, confident.any(), {"confident": out.share(confident)})
