"""What a training run is: every setting that its weights depend on."""

import math
from dataclasses import dataclass
from pathlib import Path

from dpl.core.errors import SettingError
from dpl.streams.domain import whole_number

__all__ = ["TrainSpec"]


@dataclass(frozen=True, kw_only=True)
class TrainSpec:
    """One source model. Its defaults are DomainBed's; two runs of the same settings end with the same weights."""

    dataset: str
    """Name of the benchmark, as `dpl.data.open_benchmark` takes it."""
    target: str | None = None
    """Domain that is left out: all others are trained on."""
    source: str | None = None
    """The only domain that is trained on (single-source generalisation); instead of `target`."""
    network: str = "resnet18"
    """Name of the network, as `dpl.backbones.create` takes it."""
    weights: str | Path | None = None
    """Checkpoint to start from; its head is replaced where the number of classes differs. None: random weights."""
    size: int = 224
    """Side of the images, in pixels."""
    steps: int = 5001
    """Number of updates."""
    lr: float = 5e-5
    """Learning rate of Adam, the same at all steps."""
    per_domain: int = 32
    """Images of each source domain in a batch."""
    eval_every: int = 300
    """Validate after step 0 and every so many steps, and after the last one."""
    max_val: int | None = None
    """Validate on at most so many images of each domain; None: on all that are held out."""
    seed: int = 0
    """Decides the batches, the augmentation and the initial head."""
    trial_seed: int = 0
    """Decides the split of each domain into training and validation images."""

    def __post_init__(self) -> None:
        if (self.target is None) == (self.source is None):
            raise SettingError(
                f"target={self.target!r}, source={self.source!r}: expected one of them, the domain to leave out or "
                "the only one to train on"
            )
        for name in ("size", "steps", "per_domain", "eval_every"):
            whole_number(name, getattr(self, name), least=1)
        for name in ("seed", "trial_seed"):
            whole_number(name, getattr(self, name), least=0)
        if self.max_val is not None:
            whole_number("max_val", self.max_val, least=1)
        if not (math.isfinite(self.lr) and self.lr > 0):
            raise SettingError(f"lr={self.lr!r}: expected a learning rate above 0, such as 5e-5")
