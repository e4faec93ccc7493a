"""RDumb: ETA that returns to the source at fixed intervals.

Press et al., RDumb: A simple approach that questions our progress in continual test-time adaptation, NeurIPS 2023.

    after every k-th batch: theta <- theta0, optimizer and average prediction forgotten

Updates: as ETA. Needs: as ETA. Output: from before the update. Departure: E0 is 0.4 ln C as in ETA and the RMT
library (the authors' constant, ln(1000)/2 - 1 = 0.36 ln C, is written for 1000 classes), and `redundancy` is ETA's
for ten classes.
"""

from dataclasses import dataclass

from torch import Tensor

from dpl.core.settings import setting
from dpl.methods.eta import ETA, ETASettings
from dpl.methods.parts.source_weights import SourceWeights, restart
from dpl.methods.registry import register
from dpl.network import Network

__all__ = ["RDumb", "RDumbSettings"]


@dataclass(frozen=True, kw_only=True)
class RDumbSettings(ETASettings):
    """Settings of RDumb."""

    reset_every: int = setting(1000, "k: batches between two returns to the source", low=1)


@register(
    "rdumb",
    paper="Press et al., RDumb: A simple approach that questions our progress in continual TTA, NeurIPS 2023",
    updates="affine parameters of normalisation layers",
    passes="1 forward, 1 backward",
)
class RDumb(ETA[RDumbSettings]):
    """ETA, restarted every k batches."""

    settings_class = RDumbSettings
    batches: int
    source_weights: SourceWeights

    def __init__(self, network: Network, settings: RDumbSettings) -> None:
        super().__init__(network, settings)
        self.declare_part("source_weights", SourceWeights(self.trainable))
        self.declare(batches=0)

    def step(self, images: Tensor) -> Tensor:
        """One batch of ETA, and the return when it is due."""
        logits = super().step(images)
        self.batches += 1
        self.facts["restarted"] = due = self.batches >= self.settings.reset_every
        if due:
            restart(self, self.source_weights)
            self.average, self.batches = None, 0
        return logits
