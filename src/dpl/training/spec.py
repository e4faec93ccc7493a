"""Settings of a training run: everything that its weights depend on."""

from dataclasses import dataclass
from pathlib import Path

from dpl.core.errors import SettingError
from dpl.core.settings import Checked, setting

__all__ = ["TrainSpec"]


@dataclass(frozen=True, kw_only=True)
class TrainSpec(Checked):
    """One source model. The defaults are DomainBed's; two runs with the same settings end with the same weights."""

    dataset: str
    """Name of the benchmark, as `dpl.data.open_benchmark` takes it."""
    target: str | None = setting(None, "domain to leave out; all others are trained on")
    source: str | None = setting(None, "the only domain to train on, instead of a target")
    network: str = setting("resnet18", "name of the network")
    weights: str | Path | None = setting(None, "checkpoint to start from; a head for other classes is replaced")
    size: int = setting(224, "side of the images in pixels", low=1)
    steps: int = setting(5001, "number of updates", low=1)
    lr: float = setting(5e-5, "learning rate of Adam, constant", low=1e-12)
    per_domain: int = setting(32, "images of each source domain in a batch", low=1)
    eval_every: int = setting(300, "steps between validations; also after the first and the last step", low=1)
    max_val: int | None = setting(None, "largest number of validation images of each domain; all if not given", low=1)
    seed: int = setting(0, "seed of batches, augmentation and the initial head", low=0)
    trial_seed: int = setting(0, "seed of the split into training and validation images", low=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.target is None) == (self.source is None):
            raise SettingError(
                f"target={self.target!r}, source={self.source!r}: expected one of them, the domain to leave out or "
                "the only one to train on"
            )
