"""CMF: ROID whose ensemble follows a Kalman filter between the source and the adapted weights.

Lee, Chang, Continual Momentum Filtering on Parameter Space for Online Test-time Adaptation, ICLR 2024. The loss and
the prior correction are ROID's. After each step the hidden weights m (at first the source's, theta0) with variance P
(at first 0) are predicted, updated by the adapted weights theta as an observation, and averaged with them:

    m <- alpha m + (1 - alpha) theta0,    P <- alpha^2 P + q
    b  = r / (P + r),    P <- b P,    m <- b m + (1 - b) theta
    theta <- gamma theta + (1 - gamma) m

with q = Q n / 38400 for n trained values (38400: the LayerNorms of a ViT-Base) and r = 1 - q. b is at least 0.89,
and 1 from 0.9999 on. Updates: affine parameters of normalisation layers, with batch statistics. Needs: such layers.
Output: from before the update, corrected by the prior. Adam 1e-3 is for CIFAR; for ImageNet the authors use SGD with
Nesterov's momentum and 2.5e-4.
Departures from the authors' code: those of ROID; `reset` also forgets P. q is at most 1, so that r is not negative.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from dpl.core.settings import setting
from dpl.methods.registry import register
from dpl.methods.roid import ROID, ROIDSettings
from dpl.network import Network

__all__ = ["CMF", "CMFSettings"]

_VIT_BASE = 38_400  # affine values of a ViT-Base, for which Q was chosen
_LOWEST, _ONE = 0.89, 0.9999  # the authors' bounds of b


@dataclass(frozen=True, kw_only=True)
class CMFSettings(ROIDSettings):
    """Settings of CMF; `weight_momentum` is gamma."""

    alpha: float = setting(0.99, "share of the hidden weights in their mix with the source's", low=0, high=1)
    process_noise: float = setting(0.005, "Q: how fast the hidden weights may move, for the size of a ViT-Base", low=0)


@register(
    "cmf",
    paper="Lee, Chang, Continual Momentum Filtering on Parameter Space for Online Test-time Adaptation, ICLR 2024",
    updates="affine parameters of normalisation layers",
    passes="2 forward, 2 backward",
    views=True,
    host_reads=1,
)
class CMF(ROID):
    """Weighted likelihood ratios, ensembled with filtered weights."""

    settings_class = CMFSettings
    settings: CMFSettings
    hidden: Tensor  # m - theta0, flat
    variance: float  # P

    def __init__(self, network: Network, settings: CMFSettings) -> None:
        super().__init__(network, settings)
        self.declare(hidden=self.source_weights.displacement().detach(), variance=0.0)
        self.noise = min(1.0, settings.process_noise * self.hidden.numel() / _VIT_BASE)  # q

    def ensemble(self) -> None:
        """Filter the adapted weights, and average them with the filtered ones."""
        s = self.settings
        with torch.no_grad():
            adapted = self.source_weights.displacement()
            predicted = s.alpha * self.hidden
            self.hidden = torch.lerp(adapted, predicted, self._gain())
            self.source_weights.shift((1 - s.weight_momentum) * (self.hidden - adapted))

    def _gain(self) -> float:
        """Return b, and let P follow."""
        variance = self.settings.alpha**2 * self.variance + self.noise
        gain = max(_LOWEST, (1 - self.noise) / (variance + 1 - self.noise))
        gain = 1.0 if gain >= _ONE else gain
        self.variance = gain * variance
        return gain
