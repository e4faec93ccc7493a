"""One look for all figures, curves with the range of their seeds, and saving: colour-blind safe, readable in print."""

from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from numpy.typing import NDArray

from dpl.core.extras import optional

__all__ = ["COLOURS", "FORMATS", "LOOK", "NOTE", "axes", "colour", "draw_line", "draw_runs", "not_run", "save_figure"]

LOOK: Mapping[str, Any] = yaml.safe_load(files("dpl.reproduce").joinpath("figures.yaml").read_text(encoding="utf-8"))
COLOURS: Mapping[str, str] = LOOK["colours"]
NOTE: Mapping[str, Any] = {"fontsize": 8, "color": "#555555"}
FORMATS = ("png", "svg", "pdf")
_LABEL_GAP = 0.06  # of the axis' height, between the names at the right ends of curves


def colour(method: str, index: int = 0) -> str:
    """Return the colour of a method; `index` tells apart those without one of their own."""
    others: list[str] = LOOK["other_methods"]
    return COLOURS.get(method, others[index % len(others)])


def axes(rows: int = 1, columns: int = 1, width: float = 6.4, height: float = 4.0) -> tuple[Any, Any]:
    """Return a figure without a window, and its axes."""
    figure = optional("matplotlib.figure", "bench").Figure(figsize=(width, height), layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False)
    for axis in grid.flat:
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(axis="y", color="#dddddd", linewidth=0.7)
        axis.set_axisbelow(True)
    return figure, grid


def draw_runs(
    axis: Any, methods: Mapping[str, Sequence[NDArray[np.float64]]], names: Mapping[str, str], start: int = 1
) -> None:
    """Draw each method's mean over seeds as a line from x = `start` on, their range as a band, the end as a label."""
    ends = []
    for index, (method, runs) in enumerate(methods.items()):
        name, shade = names.get(method, method), colour(method, index)
        length = min(map(len, runs))
        stacked = np.stack([run[:length] for run in runs])
        dashes = {"linestyle": (0, (5, 2))} if method == "source" else {}
        draw_line(axis, range(start, start + length), stacked, color=shade, linewidth=2, label=name, **dashes)
        ends.append((float(stacked[:, -1].mean()), name, shade))
    (bottom, top), place = axis.get_ylim(), -np.inf
    for value, name, shade in sorted(ends):  # labels are moved apart where they would overlap
        place = max(value, place + _LABEL_GAP * (top - bottom))
        axis.annotate(
            f"{name} {value:.1f}", xy=(1.01, place), xycoords=("axes fraction", "data"), color=shade, va="center"
        )
    axis.margins(x=0.01)


def draw_line(axis: Any, x: Sequence[float], runs: NDArray[np.float64], **look: Any) -> None:
    """Draw the mean over seeds as a line, and their range as a band; one seed has none."""
    lows, highs = np.nanmin(runs, axis=0), np.nanmax(runs, axis=0)
    if np.any(highs > lows):
        axis.fill_between(x, lows, highs, color=look["color"], alpha=0.18, linewidth=0)
    axis.plot(x, np.nanmean(runs, axis=0), **look)


def not_run(axis: Any) -> None:
    """Say in an empty panel why it is empty."""
    axis.text(0.5, 0.5, "not run", transform=axis.transAxes, ha="center", color="#555555")


def save_figure(figure: Any, folder: Path, name: str) -> list[Path]:
    """Write all formats; text stays text in SVG, and the same drawing gives the same bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{name}.{suffix}" for suffix in FORMATS]
    dateless: dict[str, dict[str, None]] = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}
    with optional("matplotlib", "bench").rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        for path in paths:
            figure.savefig(path, dpi=120, metadata=dateless.get(path.suffix))
    return paths
