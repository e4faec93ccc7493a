"""The settings that every method has; each method's own extend these."""

from dataclasses import dataclass
from typing import Literal

from dpl.core.optimizer import OptimizerFactory
from dpl.core.settings import Checked, setting
from dpl.methods.parts.norm_rules import parse_norm

__all__ = ["GradientSettings", "Settings"]


@dataclass(frozen=True, kw_only=True)
class Settings(Checked):
    """Settings of every method."""

    norm: str | float = setting(
        "running",
        "BatchNorm statistics: 'running', 'batch', 'track' (the batch's, which also update the running ones), "
        "'median' (MedBN), 'unmix' (UnMix-TNS), 'renorm' (DELTA), "
        "the batch's share in a blend, or 'auto' (that share by the effective size of the batch and of the shift)",
    )
    norm_prior: float = setting(
        128,
        "with norm='auto': images that the source statistics count for, fewer below batches of 32",
        low=0,
        later=True,
    )
    norm_shift: float = setting(
        0.02,
        "with norm='auto': shift of the images, in variances of the source's, up to which its statistics stay",
        low=0,
        later=True,
    )
    seed: int = setting(0, "seed of the method's own random generator", low=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        parse_norm(self.norm)


@dataclass(frozen=True, kw_only=True)
class GradientSettings(Settings):
    """Settings of every method that takes gradient steps."""

    lr: float = setting(1e-3, "learning rate", low=0)
    optimizer: str | OptimizerFactory = setting(
        "adam", "'adam', 'sgd' (momentum 0.9), 'nesterov' (the same with Nesterov's), or a callable of the parameters"
    )
    weight_decay: float = setting(0.0, "weight decay of the optimizer", low=0)
    steps: int = setting(1, "updates for each batch", low=1)
    scope: Literal["affine", "classifier", "features", "all"] = setting("affine", "which parameters train")
    train_from: str | None = setting(
        None, "first module that trains, in order of definition; earlier ones run without a graph", formerly="start"
    )
    adapt_every: int = setting(1, "adapt to every k-th batch and only predict the others", low=1, formerly="interval")
    min_selected: float = setting(
        0.0, "skip the update if fewer samples of a batch pass the method's filter", low=0, high=1, formerly="least"
    )
    second_pass: Literal["auto", "always", "never"] = setting(
        "auto",
        "run the selected samples again with a graph, instead of the whole batch once; 'auto': on a CPU, where few "
        "samples were selected in the last batch",
        later=True,
    )
    output: Literal["before", "after"] = setting("before", "return the prediction from before or after the last update")
