"""Cumulative accuracy over a stream (the paper's Figure 1)."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpl.reproduce.style import axes, colour

__all__ = ["cumulative_accuracy", "end_labels", "save_figure"]

Curves = Mapping[str, Sequence[NDArray[np.float64]]]


def cumulative_accuracy(panels: Mapping[str, Curves], path: Path, title: str = "", skip: int = 32) -> Path:
    """Draw one panel for each stream: the mean over seeds as a line, their range as a band, the end value as a label.

    Args:
        panels: stream name -> method -> cumulative accuracy in percent after each image, one array for each seed.
        path: where to write; the suffix decides the format.
        title: a line above the figure.
        skip: leave out the first images, where the mean over a handful says nothing.
    """
    figure, grid = axes(1, len(panels), width=1.0 + 5.4 * len(panels))
    for axis, (name, curves) in zip(grid.flat, panels.items(), strict=True):
        _draw(axis, curves, skip)
        axis.set_title(name, fontsize=11)
        axis.set_xlabel("images seen")
        axis.set_ylabel("cumulative accuracy (%)")
    figure.suptitle(title, fontsize=10)
    return save_figure(figure, path)


def save_figure(figure: Any, path: Path) -> Path:
    """Write a figure and free its memory."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    figure.clf()
    return path


def _draw(axis: Any, curves: Curves, skip: int) -> None:
    labels = []
    for index, (method, runs) in enumerate(curves.items()):
        stacked = np.stack(runs)[:, skip:]
        seen = np.arange(skip + 1, skip + 1 + stacked.shape[1])
        axis.fill_between(seen, stacked.min(0), stacked.max(0), color=colour(method, index), alpha=0.2, linewidth=0)
        axis.plot(seen, stacked.mean(0), color=colour(method, index), linewidth=2, label=method)
        labels.append((float(stacked[:, -1].mean()), method, colour(method, index)))
    end_labels(axis, labels)
    axis.margins(x=0.01)


def end_labels(axis: Any, labels: list[tuple[float, str, str]], least: float = 0.055) -> None:
    """Write each curve's name and end value at its right end, moved apart where they would overlap."""
    bottom, top = axis.get_ylim()
    gap, place = least * (top - bottom), -np.inf
    for value, method, shade in sorted(labels):
        place = max(value, place + gap)
        axis.annotate(
            f"{method} {value:.1f}", xy=(1.01, place), xycoords=("axes fraction", "data"), color=shade, va="center"
        )
