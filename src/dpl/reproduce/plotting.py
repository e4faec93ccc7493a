"""One look for all figures, curves with the range of their seeds, and saving: colour-blind safe, readable in print."""

from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from numpy.typing import NDArray
from PIL import Image

from dpl.core.extras import optional

__all__ = [
    "COLOURS", "FORMATS", "LOOK", "axes", "colour", "cumulative_accuracy", "draw_band", "draw_runs", "save_figure",
]  # fmt: skip

LOOK: Mapping[str, Any] = yaml.safe_load(files("dpl.reproduce").joinpath("figures.yaml").read_text(encoding="utf-8"))
"""Titles, names, colours and markers of the figures."""
COLOURS: Mapping[str, str] = LOOK["colours"]
_LABEL_GAP = 0.06  # of the axis' height, between the names at the right ends of curves
FORMATS = ("png", "svg", "pdf")
_PALETTE = 128

Runs = Mapping[str, Sequence[NDArray[np.float64]]]
"""Method -> one curve for each seed."""


def colour(method: str, index: int = 0) -> str:
    """Return the colour of a method; `index` tells apart those without one of their own."""
    others: list[str] = LOOK["other_methods"]
    return COLOURS.get(method, others[index % len(others)])


def axes(rows: int = 1, columns: int = 1, width: float = 6.4, height: float = 4.0) -> tuple[Any, Any]:
    """Return a figure without a window, and its axes."""
    optional("matplotlib", "bench").use("Agg")
    plt = optional("matplotlib.pyplot", "bench")
    figure, grid = plt.subplots(rows, columns, figsize=(width, height), layout="constrained", squeeze=False)
    for axis in grid.flat:
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(axis="y", color="#dddddd", linewidth=0.7)
        axis.set_axisbelow(True)
    return figure, grid


def cumulative_accuracy(panels: Mapping[str, Runs], path: Path, title: str = "", skip: int = 32) -> Path:
    """Draw one panel for each stream: the mean over seeds as a line, their range as a band, the end value as a label.

    Args:
        panels: stream name -> method -> cumulative accuracy in percent after each image, one array for each seed.
        path: where to write; the suffix decides the format.
        title: a line above the figure.
        skip: leave out the first images, where the mean over a handful says nothing.
    """
    figure, grid = axes(1, len(panels), width=1.0 + 5.4 * len(panels))
    for axis, (name, runs) in zip(grid.flat, panels.items(), strict=True):
        draw_runs(axis, {method: [run[skip:] for run in curves] for method, curves in runs.items()}, start=skip + 1)
        axis.set_title(name, fontsize=11)
        axis.set_xlabel("images seen")
        axis.set_ylabel("cumulative accuracy (%)")
    figure.suptitle(title, fontsize=10)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    optional("matplotlib.pyplot", "bench").close(figure)
    return path


def draw_runs(axis: Any, methods: Runs, start: int = 1, names: Mapping[str, str] | None = None) -> None:
    """Draw each method's mean over seeds as a line from x = `start` on, their range as a band, the end as a label."""
    ends = []
    for index, (method, runs) in enumerate(methods.items()):
        name, shade = (names or {}).get(method, method), colour(method, index)
        length = min(map(len, runs))
        stacked = np.stack([run[:length] for run in runs])
        x = np.arange(start, start + length)
        draw_band(axis, x, stacked.min(0), stacked.max(0), shade)
        dashes = {"linestyle": (0, (5, 2))} if method == "source" else {}
        axis.plot(x, stacked.mean(0), color=shade, linewidth=2, label=name, **dashes)
        ends.append((float(stacked[:, -1].mean()), name, shade))
    _label_ends(axis, ends)
    axis.margins(x=0.01)


def draw_band(axis: Any, x: Any, lows: Any, highs: Any, shade: str) -> None:
    """Shade the range of the seeds; one seed has none."""
    if np.any(np.asarray(highs) > np.asarray(lows)):
        axis.fill_between(x, lows, highs, color=shade, alpha=0.18, linewidth=0)


def _label_ends(axis: Any, ends: list[tuple[float, str, str]]) -> None:
    """Write each curve's name and end value at its right end, moved apart where they would overlap."""
    bottom, top = axis.get_ylim()
    place = -np.inf
    for value, name, shade in sorted(ends):
        place = max(value, place + _LABEL_GAP * (top - bottom))
        axis.annotate(
            f"{name} {value:.1f}", xy=(1.01, place), xycoords=("axes fraction", "data"), color=shade, va="center"
        )


def save_figure(figure: Any, folder: Path, name: str) -> list[Path]:
    """Write all formats; text stays text in SVG, and the same drawing gives the same bytes."""
    matplotlib = optional("matplotlib", "bench")
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{name}.{suffix}" for suffix in FORMATS]
    dateless: dict[str, dict[str, None]] = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        for path in paths:
            figure.savefig(path, dpi=120, metadata=dateless.get(path.suffix[1:]))
    _reduce_colours(paths[0])
    optional("matplotlib.pyplot", "bench").close(figure)
    return paths


def _reduce_colours(path: Path) -> None:
    """Write a PNG again with a palette: flat colours lose nothing, and the file shrinks to a third."""
    with Image.open(path) as image:
        small = image.convert("RGB").quantize(_PALETTE, dither=Image.Dither.NONE)
    small.save(path, optimize=True)
