"""Pictures of one step, of the memory, and of style transfer."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dpl.memory import update_class_memory
from dpl.objectives import adain
from tools.canvas import CARD, CLASSES, INK, MUTED, PULL, PUSH, SOFT, arrow, board, box
from tools.forces import unit

__all__ = ["memory", "one_step", "style"]

NAMES = list(CLASSES)
BATCHES = 14
PRESENT = {"cat": range(14), "dog": (0, 1, 4, 5, 6, 9, 12), "bird": ()}  # batches with confident samples of the class
MOMENTUM = 0.8
NOTES = {
    "cat": "follows every batch",
    "dog": "follows when seen, else stays",
    "bird": "never seen: stays at w, still takes part in Eq. 6",
}


def one_step() -> tuple[Any, str]:
    """Draw what a call of the adaptive model does."""
    figure, (axis,) = board(1, 9.6, 3.4)
    axis.set(xlim=(0, 12), ylim=(0, 4.2))
    box(axis, (1.2, 3.2), (1.9, 1.1), "batch of images,\nno labels")
    box(axis, (4.3, 3.2), (2.0, 1.1), "network\n(a private copy)", PULL)
    box(axis, (7.4, 3.2), (2.0, 1.1), "logits")
    box(axis, (10.6, 3.2), (2.1, 1.1), "your answer,\nfrom before\nthe update", CLASSES["bird"][0])
    box(axis, (9.3, 0.9), (2.5, 1.1), "confident?\np > alpha", MUTED)
    box(axis, (6.0, 0.9), (2.2, 1.1), "DPL loss\nwith memory", PUSH)
    box(axis, (2.6, 0.9), (2.2, 1.1), "one optimizer\nstep", PULL)
    for start, end in (((2.15, 3.2), (3.3, 3.2)), ((5.3, 3.2), (6.4, 3.2)), ((8.4, 3.2), (9.55, 3.2))):
        arrow(axis, start, end)
    arrow(axis, (7.8, 2.65), (8.9, 1.45))
    arrow(axis, (8.05, 0.9), (7.1, 0.9))
    arrow(axis, (4.9, 0.9), (3.7, 0.9))
    arrow(axis, (2.9, 1.45), (3.9, 2.65))
    axis.text(9.3, 0.12, "none: no step, nothing changes", ha="center", va="center", fontsize=10, color=MUTED)
    axis.text(3.55, 1.85, "changes", ha="left", va="center", fontsize=10, color=MUTED)
    return figure, (
        "One call: a batch goes through a private copy of the network, the logits are returned as the answer, and the "
        "confident samples give the DPL loss for one optimizer step."
    )


def memory() -> tuple[Any, str]:
    """Draw how the pseudo-features follow the stream, computed with Eq. 5."""
    figure, (left, right) = board(2, 9.6, 3.9)
    tracks, samples = _follow()
    left.set_aspect("equal", adjustable="datalim")
    left.set_title("Pseudo-features follow the stream (Eq. 5)", fontsize=12)
    for k, (name, (colour, marker)) in enumerate(CLASSES.items()):
        start, end = tracks[0, k], tracks[-1, k]
        left.scatter(*samples[name].T, s=22, marker=marker, color=colour, alpha=0.3, linewidth=0)
        left.plot(*tracks[:, k].T, color=colour, linewidth=1.5, marker=".", markersize=7)
        left.scatter(*start, s=210, marker="*", color=colour, zorder=4)
        left.text(start[0], start[1] - 0.12, f"w {name}", color=colour, fontweight="bold", ha="center", va="top")
        if PRESENT[name]:
            left.scatter(*end, s=110, marker=marker, facecolor=CARD, edgecolor=colour, linewidth=2.2, zorder=4)
    left.margins(0.12)
    _presence(right)
    return figure, (
        "Left: each class's pseudo-feature starts at its prototype and moves towards the confident samples of the "
        "stream; that of a class never seen stays. Right: which class had confident samples in which batch."
    )


def _follow() -> tuple[NDArray[np.float64], dict[str, NDArray[np.float64]]]:
    """Return the memory after every batch [batches + 1, 3, 2], and all samples by class."""
    generator = torch.Generator().manual_seed(4)
    prototypes = unit(torch.tensor([90.0, 210.0, 330.0]))
    centres = unit(torch.tensor([52.0, 172.0, 330.0])) * torch.tensor([[1.55], [1.5], [1.0]])
    rows, tracks = prototypes, [prototypes]
    samples: dict[str, list[Tensor]] = {name: [] for name in NAMES}
    for batch in range(BATCHES):
        labels = torch.tensor([k for k, name in enumerate(NAMES) if batch in PRESENT[name] for _ in range(3)])
        features = centres[labels] + 0.22 * torch.randn(len(labels), 2, generator=generator, dtype=torch.float64)
        rows = update_class_memory(rows, features, labels, MOMENTUM)
        tracks.append(rows)
        for k, name in enumerate(NAMES):
            samples[name].append(features[labels == k])
    return torch.stack(tracks).numpy(), {name: torch.cat(parts).numpy() for name, parts in samples.items()}


def _presence(axis: Any) -> None:
    axis.set_title("Confident samples in each batch", fontsize=12)
    axis.set(xlim=(-3.2, BATCHES + 0.2), ylim=(-3.3, 3.0))
    for row, (name, (colour, marker)) in enumerate(CLASSES.items()):
        y = 2.2 - 1.8 * row
        axis.text(-0.9, y, name, ha="right", va="center", color=colour, fontweight="bold")
        for batch in range(BATCHES):
            seen = batch in PRESENT[name]
            axis.scatter(batch, y, s=70 if seen else 22, marker=marker if seen else "_", color=colour if seen else SOFT)
        axis.text(-0.3, y - 0.62, NOTES[name], va="center", fontsize=10, color=MUTED)
    axis.text(
        BATCHES / 2 - 0.5, -3.0, "batches of the stream, in order", ha="center", va="center", fontsize=10, color=INK
    )


def style() -> tuple[Any, str]:
    """Draw AdaIN on pixels: one image keeps its shapes and takes the other's mean and contrast."""
    figure, axes = board(4, 9.6, 3.1)
    content, donor = _photograph(), _night()
    styled = adain(content[None], donor[None])[0].clamp(0, 1)
    titles = ("confident sample", "unconfident sample", "the first in the\nstyle of the second")
    for axis, image, title in zip(axes, (content, donor, styled), titles, strict=False):
        axis.imshow(image.permute(1, 2, 0).numpy(), interpolation="nearest")
        axis.set_title(title, fontsize=11)
    for axis, sign in zip(axes[:2], ("+", "="), strict=True):
        axis.text(1.06, 0.5, sign, transform=axis.transAxes, fontsize=17, va="center", ha="center", color=MUTED)
    _statistics(axes[3], (content, donor, styled))
    return figure, (
        "A bright image of shapes and a dark bluish one; the first with the channel means and deviations of the second "
        "keeps its shapes and looks dark and bluish. Beside: those statistics."
    )


def _statistics(axis: Any, images: tuple[Tensor, ...]) -> None:
    axis.set_title("mean ± deviation\nof each channel", fontsize=11)
    axis.set(xlim=(-0.9, 2.7), ylim=(-0.18, 1.12))
    for place, image in enumerate(images):
        for channel, (colour, marker) in enumerate((("#d55e00", "s"), ("#009e73", "^"), ("#0072b2", "o"))):
            mean, deviation = float(image[channel].mean()), float(image[channel].std(correction=0))
            x = place + 0.22 * (channel - 1)
            axis.errorbar(x, mean, deviation, color=colour, marker=marker, markersize=6, linewidth=2, capsize=0)
        axis.text(place, -0.14, ("first", "second", "styled")[place], ha="center", fontsize=9.5, color=MUTED)
    axis.plot([-0.6, -0.6], [0, 1], color=SOFT, linewidth=1.2)
    for tick in (0, 1):
        axis.text(-0.68, tick, str(tick), ha="right", va="center", fontsize=9.5, color=MUTED)


def _grid(size: int = 96) -> tuple[Tensor, Tensor]:
    line = torch.linspace(-1, 1, size)
    x, y = torch.meshgrid(line, line, indexing="xy")  # x to the right, y downwards
    return x, y


def _photograph() -> Tensor:
    """Return a bright image: sky, hill, sun and a house."""
    x, y = _grid()
    image = torch.stack([0.72 - 0.1 * y, 0.86 - 0.05 * y, 0.98 - 0.02 * y])
    _paint(image, y > 0.28 + 0.18 * torch.cos(2.2 * x + 0.6), (0.45, 0.72, 0.30))
    _paint(image, (x - 0.58) ** 2 + (y + 0.58) ** 2 < 0.05, (1.0, 0.86, 0.25))
    _paint(image, (x.add(0.25).abs() < 0.32) & (y > -0.12) & (y < 0.52), (0.93, 0.89, 0.80))
    _paint(image, (y < -0.12) & (y > -0.5 + 1.0 * x.add(0.25).abs()), (0.80, 0.29, 0.22))
    _paint(image, (x.add(0.25).abs() < 0.09) & (y > 0.16) & (y < 0.52), (0.42, 0.27, 0.18))
    return image.clamp(0, 1)


def _night() -> Tensor:
    """Return a dark image of little contrast: rain over water."""
    x, y = _grid()
    image = torch.stack([0.27 + 0.10 * y, 0.32 + 0.11 * y, 0.50 + 0.15 * y])
    waves = 0.10 * torch.sin(9 * y + 2 * torch.sin(3 * x)) * (y > 0.1)
    rain = 0.14 * (torch.sin(38 * x + 11 * y) > 0.93)
    _paint(image, x**2 + (y + 0.45) ** 2 < 0.03, (0.62, 0.64, 0.72))
    return (image + waves + rain).clamp(0, 1)


def _paint(image: Tensor, where: Tensor, colour: tuple[float, float, float]) -> None:
    image[:, where] = torch.tensor(colour)[:, None]
