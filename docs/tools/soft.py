"""Picture of soft DPL: whose statistics count, and how much each sample counts."""

from typing import Any

import numpy as np
import torch

from dpl.methods.parts.norm_rules import AutoBlend
from tools.canvas import CLASSES, MUTED, PULL, PUSH, SOFT, board
from tools.forces import TAU

__all__ = ["soft_dpl"]

CONFIDENCE, COSINE = 0.9, 0.7
SIZES = np.arange(1, 257)
CORRELATIONS = {0.0: "mixed", 0.1: "10 % correlated", 1.0: "one class in each batch"}
COLOURS = [colour for colour, _ in CLASSES.values()]


def soft_dpl() -> tuple[Any, str]:
    """Plot the share of batch statistics, and the pull of a sample by its probability."""
    figure, (left, right) = board(2, 9.6, 3.9, drawing=False)
    _statistics(left)
    _samples(right)
    return figure, (
        "Left: the share of batch statistics by batch size, for mixed, slightly correlated and one-class batches. "
        "Right: the share of a class's positives that one sample has, by its probability: none below the threshold in "
        "DPL, rising from zero in soft DPL."
    )


def _statistics(axis: Any) -> None:
    axis.set_title("Statistics: what the batch is worth", fontsize=12)
    axis.set(xscale="log", xlim=(1, 256), ylim=(0, 74))
    axis.set(xlabel="images in the batch", ylabel="share of batch statistics (%)")
    axis.set_xticks([1, 2, 8, 32, 128, 256], labels=["1", "2", "8", "32", "128", "256"])
    axis.minorticks_off()
    rule = AutoBlend()
    for colour, (rho, name) in zip(COLOURS, CORRELATIONS.items(), strict=True):
        rule.rho = torch.tensor(rho)
        shares = [100 * float(rule.share(int(size))) for size in SIZES]
        axis.plot(SIZES, shares, color=colour, linewidth=2.6)
        axis.text(230, shares[-1] + 1.5, name, color=colour, fontweight="bold", ha="right", va="bottom")


def _samples(axis: Any) -> None:
    axis.set_title("Loss: how much a sample counts", fontsize=12)
    axis.set(xlim=(0, 1), ylim=(0, 25), ylabel="its share of the positives (%)")
    axis.set_xlabel("probability of the class, for one of five samples")
    certain = torch.linspace(0, 1, 201, dtype=torch.float64)
    for colour, name, weights, place in (
        (PULL, "soft DPL", certain, (0.45, 11.5)),
        (PUSH, "DPL", (certain > CONFIDENCE).double(), (0.88, 3)),
    ):
        axis.plot(certain, [100 * _share(float(weight)) for weight in weights], color=colour, linewidth=2.6)
        axis.text(*place, name, color=colour, fontweight="bold", ha="right")
    axis.axvline(CONFIDENCE, color=SOFT, linewidth=1, zorder=0)
    axis.text(CONFIDENCE - 0.02, 23, "alpha", ha="right", color=MUTED, fontsize=10)


def _share(weight: float) -> float:
    """Return what one sample gives to the positives of its class, beside four certain ones as near to the prototype."""
    similarity = torch.full((5,), COSINE / TAU, dtype=torch.float64)
    weights = torch.tensor([weight, 1.0, 1.0, 1.0, 1.0], dtype=torch.float64)
    return float((similarity + weights.log()).softmax(dim=0)[0])
