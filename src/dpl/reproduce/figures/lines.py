"""Lines over a setting: a value for each seed at each x, the mean drawn, the range of the seeds as a band."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from dpl.reproduce.layouts import Layout, Row
from dpl.reproduce.series import Series, collect

__all__ = ["MARKERS", "NAMES", "Line", "draw_band", "draw_line", "grouping", "series_of", "ticks"]

NAMES = {
    "source": "Source", "tent": "TENT", "pl": "PL", "tsd": "TSD", "dpl_o": "DPL$^o$", "dpl_star": "DPL*", "dpl": "DPL",
    "dpl_dagger": "DPL$^†$", "art_painting": "art painting",
}  # fmt: skip
"""Of methods and domains, as the paper writes them."""
MARKERS = {"tent": "o", "pl": "s", "tsd": "^", "dpl_star": "D", "dpl": "v"}


@dataclass(frozen=True)
class Line:
    """For each x the value of each seed, in percent."""

    points: Mapping[Any, Mapping[int, float]]

    def mean(self, x: Any) -> float:
        """Return the mean over the seeds at one x."""
        return fmean(self.points[x].values())


def grouping(rows: Sequence[Row]) -> Callable[[Row], str]:
    """Return what tells panels (or lines) apart: the data set; if there is only one, its target domain."""
    several = len({row["dataset"] for row in rows}) > 1
    return lambda row: row["dataset"] if several else row["domains"][0]


def series_of(rows: Sequence[Row]) -> dict[tuple[str, str], Series]:
    """Return by label and group one value for each seed: the mean over the group's streams."""
    group = grouping(rows)
    layout = Layout(lambda row: (group(row), row["domains"][0]))
    return collect(rows, layout, lambda row: float(row["accuracy"]))


def draw_line(axis: Any, order: Sequence[Any], line: Line, *, colour: str, **look: Any) -> None:
    """Draw one line over equally spaced values; x without a value is left out."""
    present = [x for x in order if x in line.points]
    places = [order.index(x) for x in present]
    draw_band(axis, places, [list(line.points[x].values()) for x in present], colour)
    axis.plot(places, [line.mean(x) for x in present], color=colour, linewidth=1.8, markersize=5, **look)


def draw_band(axis: Any, places: Sequence[float], values: Sequence[Sequence[float]], colour: str) -> None:
    """Shade the range of the seeds, if there are several anywhere."""
    if any(len(found) > 1 for found in values):
        lows, highs = [min(found) for found in values], [max(found) for found in values]
        axis.fill_between(places, lows, highs, color=colour, alpha=0.18, linewidth=0)


def ticks(axis: Any, order: Sequence[Any], names: Mapping[Any, str] | None = None) -> None:
    """Name the equally spaced values below an axis."""
    texts = [names[x] if names else f"{x:g}" for x in order]
    axis.set_xticks(range(len(order)), texts)
    axis.set_xlim(-0.3, len(order) - 0.7)
