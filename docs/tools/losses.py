"""Pictures of the loss: what cross-entropy and DPL ask, who pulls a prototype, and how hard a doubtful sample pulls."""

from typing import Any

import numpy as np
import torch
from matplotlib.patches import Rectangle
from torch import Tensor

from dpl.objectives import dpl_star
from tools.canvas import CARD, CLASSES, INK, MUTED, PULL, PUSH, SOFT, arrow, board
from tools.forces import TAU, Loss, cross_entropy, pulls, unit

__all__ = ["doubtful_sample", "pull_and_push", "rows_and_columns"]

NAMES = list(CLASSES)
PROTOTYPES = torch.tensor([90.0, 210.0, 330.0])  # directions in degrees: cat, dog, bird
# Directions of the samples and their pseudo-labels; -1: not confident.
SAMPLES = torch.tensor([106.0, 70.0, 139.0, 190.0, 226.0, 312.0, 346.0, 268.0])
LABELS = torch.tensor([0, 0, 0, 1, 1, 2, 2, -1])
DOUBTFUL = 2  # a dog that the network calls a cat: on the cat's side of the border, far from the cat prototype


def rows_and_columns() -> tuple[Any, str]:
    """Draw the same similarities twice: normalised along rows (cross-entropy) and along columns (DPL)."""
    similarity = unit(SAMPLES) @ unit(PROTOTYPES).T / TAU
    left_out = (LABELS < 0)[:, None]
    rows = similarity.softmax(dim=1).masked_fill(left_out, torch.nan)
    columns = similarity.masked_fill(left_out, -torch.inf).softmax(dim=0).masked_fill(left_out, torch.nan)
    figure, (left, right) = board(2, 9.6, 4.6)
    _matrix(left, rows, "Cross-entropy: every sample chooses a prototype", "each row sums to 1")
    _matrix(right, columns, "DPL: every prototype weighs its samples", "each column sums to 1")
    left.add_patch(_frame(-0.5, DOUBTFUL - 0.5, len(NAMES), 1))
    right.add_patch(_frame(-0.5, -0.5, 1, len(LABELS) - 1))
    return figure, (
        "The same table of similarities between eight samples and three prototypes, twice. Cross-entropy makes every "
        "row sum to one, DPL every column, over confident samples only."
    )


def _matrix(axis: Any, values: Tensor, title: str, below: str) -> None:
    axis.text(0.45, -1.3, title, ha="center", va="bottom", fontsize=12)
    axis.set(xlim=(-2.25, 2.6), ylim=(len(LABELS) + 0.1, -1.7))
    for k, name in enumerate(NAMES):
        axis.text(k, -0.62, f"w {name}", ha="center", va="bottom", color=CLASSES[name][0], fontweight="bold")
    for i, label in enumerate(LABELS.tolist()):
        doubt = " (a dog)" if i == DOUBTFUL else ""
        text = f"called {NAMES[label]}{doubt}" if label >= 0 else "not confident"
        axis.text(-0.65, i, text, ha="right", va="center", fontsize=10, color=INK if label >= 0 else MUTED)
        for k in range(len(NAMES)):
            _cell(axis, k, i, float(values[i, k]))
    axis.text(1, len(LABELS) - 0.2, below, ha="center", va="center", fontsize=10, color=MUTED)


def _cell(axis: Any, x: int, y: int, value: float) -> None:
    axis.add_patch(Rectangle((x - 0.5, y - 0.5), 1, 1, facecolor="none", edgecolor=SOFT, linewidth=1))
    if np.isnan(value):
        axis.text(x, y, "–", ha="center", va="center", fontsize=10, color=MUTED)
        return
    colour = CLASSES[NAMES[x]][0]
    axis.add_patch(Rectangle((x - 0.5, y - 0.5), 1, 1, facecolor=colour, alpha=0.5 * value, linewidth=0))
    axis.text(x, y, f"{value:.2f}", ha="center", va="center", fontsize=10, color=INK)


def _frame(x: float, y: float, width: float, height: float) -> Rectangle:
    return Rectangle((x, y), width, height, fill=False, edgecolor=INK, linewidth=2.4, zorder=5)


def pull_and_push() -> tuple[Any, str]:
    """Draw which samples move the cat prototype, for cross-entropy and for DPL."""
    figure, (left, right) = board(2, 9.6, 4.9)
    _view(left, "Cross-entropy: the doubtful sample pulls", cross_entropy)
    _view(right, "DPL: the near samples pull", dpl_star)
    about = "Thick: a large share.  Solid: pulls the cat prototype.  Dashed: pushes it.  Percent: share of all pull."
    figure.text(0.5, 0.01, about, ha="center", va="bottom", fontsize=10, color=MUTED)
    return figure, (
        "A cat prototype among confident samples, one of which is a dog that is called a cat. Under cross-entropy "
        "nearly all of the pull comes from that sample; under DPL it comes from the samples near the prototype."
    )


def _view(axis: Any, title: str, loss: Loss) -> None:
    axis.set_aspect("equal")
    axis.set(xlim=(-1.45, 1.45), ylim=(-1.32, 1.2))
    axis.set_title(title, fontsize=12, pad=2)
    turn = np.linspace(0, 2 * np.pi, 200)
    axis.plot(np.cos(turn), np.sin(turn), color=SOFT, linewidth=1.2, zorder=0)
    force = pulls(loss, unit(SAMPLES), unit(PROTOTYPES), LABELS, 0)
    pull, push = force.clamp(min=0) / force.clamp(min=0).sum(), force.clamp(max=0) / force.clamp(max=0).sum()
    centre = tuple((unit(PROTOTYPES)[0] * 0.5).tolist())
    for place, strong, away in zip(unit(SAMPLES).tolist(), pull.tolist(), push.tolist(), strict=True):
        if strong > 0.002:
            arrow(axis, centre, tuple(place), PULL, 1 + 6 * strong, shrinkA=8, shrinkB=9)
        if away > 0.01:
            arrow(axis, tuple(place), centre, PUSH, 1 + 3 * away, shrinkA=9, shrinkB=9, linestyle=(0, (3, 2)))
    _stars(axis)
    _dots(axis, pull)


def _stars(axis: Any) -> None:
    for (x, y), name in zip((unit(PROTOTYPES) * 0.5).tolist(), NAMES, strict=True):
        axis.scatter(x, y, s=200, marker="*", color=CLASSES[name][0], zorder=4)
        axis.text(x, y - 0.16, f"w {name}", color=CLASSES[name][0], fontweight="bold", ha="center", va="top")


def _dots(axis: Any, pull: Tensor) -> None:
    for i, ((x, y), label) in enumerate(zip(unit(SAMPLES).tolist(), LABELS.tolist(), strict=True)):
        colour, marker = CLASSES[NAMES[label]] if label >= 0 else (MUTED, "o")
        face = colour if label >= 0 else CARD
        axis.scatter(x, y, s=75, marker=marker, facecolor=face, edgecolor=colour, linewidth=1.5, zorder=4)
        if label == 0:
            about = "a dog,\ncalled cat: " if i == DOUBTFUL else ""
            text = f"{about}{100 * pull[i]:.0f} %"
            axis.text(x * 1.09, y * 1.08, text, ha="left" if x > 0 else "right", va="center", fontsize=10.5)
        elif label < 0:
            axis.text(x, y - 0.1, "not confident: no part", ha="center", va="top", fontsize=10, color=MUTED)


def doubtful_sample() -> tuple[Any, str]:
    """Plot the share of a class's pull that one sample has, by its similarity to the prototype."""
    cosines = np.linspace(0.5, 0.9, 41)
    figure, (axis,) = board(1, 7.4, 4.0, drawing=False)
    for name, loss, colour, place in (
        ("cross-entropy", cross_entropy, PUSH, (0.545, 60)),
        ("DPL (Eq. 4)", dpl_star, PULL, (0.735, 52)),
    ):
        axis.plot(cosines, [100 * _share(loss, float(c)) for c in cosines], color=colour, linewidth=2.6)
        axis.text(*place, name, color=colour, fontweight="bold")
    axis.axhline(20, color=MUTED, linewidth=1, linestyle=(0, (4, 3)))
    axis.text(0.9, 21.5, "an even share", ha="right", color=MUTED, fontsize=10)
    axis.axvline(0.7, color=SOFT, linewidth=1, zorder=0)
    axis.text(0.703, 71, "where the four others are", color=MUTED, fontsize=10)
    axis.set(xlim=(0.5, 0.9), ylim=(0, 75), ylabel="its share of the pull (%)")
    axis.set_xlabel("cosine between one of five cat samples and the cat prototype")
    return figure, (
        "The share of the pull on a prototype that comes from one of its five samples. With cross-entropy it falls as "
        "the sample comes nearer to the prototype; with DPL it rises."
    )


def _share(loss: Loss, cosine: float) -> float:
    """Return the share of the first of five cat samples; seven classes, four samples of each of the others."""
    classes, own, others = 7, 5, 4
    labels = torch.cat([torch.zeros(own, dtype=torch.int64), torch.arange(1, classes).repeat(others)])
    cosines = torch.full((len(labels), classes), 0.1, dtype=torch.float64)
    cosines[torch.arange(len(labels)), labels] = 0.7
    cosines[0, 0] = cosine
    rest = (1 - (cosines**2).sum(dim=1)).sqrt()
    features = torch.cat([cosines, rest[:, None]], dim=1)
    force = pulls(loss, features, torch.eye(classes, classes + 1, dtype=torch.float64), labels, 0)[:own]
    return float(force[0] / force.sum())
