"""What every method can be told; each method's own settings extend these."""

from dataclasses import dataclass
from typing import Literal

from dpl.core.optimizer import OptimizerFactory
from dpl.core.settings import Checked, setting
from dpl.network.norm import parse_norm

__all__ = ["GradientSettings", "Settings"]


@dataclass(frozen=True, kw_only=True)
class Settings(Checked):
    """What every method can be told."""

    norm: str | float = setting(
        "running",
        "BatchNorm statistics: 'running', 'batch', 'track' (the batch's, which also move the running ones), "
        "the batch's share in a blend, or 'auto' (that share chosen from the stream)",
    )
    seed: int = setting(0, "seed of the method's own random generator", low=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        parse_norm(self.norm)


@dataclass(frozen=True, kw_only=True)
class GradientSettings(Settings):
    """What every method that takes gradient steps can be told."""

    lr: float = setting(1e-3, "learning rate", low=0)
    optimizer: str | OptimizerFactory = setting(
        "adam", "'adam', 'sgd' (momentum 0.9), 'nesterov' (the same with Nesterov's), or a callable of the parameters"
    )
    weight_decay: float = setting(0.0, "weight decay of the optimizer", low=0)
    steps: int = setting(1, "updates for each batch", low=1)
    scope: Literal["affine", "classifier", "features", "all"] = setting("affine", "what trains")
    start: str | None = setting(
        None, "module before which nothing trains (in order of definition); what lies before it runs without a graph"
    )
    interval: int = setting(1, "learn from every k-th batch and only predict the others", low=1)
    least: float = setting(
        0.0, "learn only where this share of a batch was selected, if the method selects", low=0, high=1
    )
    output: Literal["before", "after"] = setting("before", "return the prediction from before or after the last update")
