"""Figure 4: accuracy over batch sizes."""

from collections.abc import Mapping, Sequence
from typing import Any

from dpl.reproduce.figures.lines import MARKERS, NAMES, Line, draw_line, series_of, ticks
from dpl.reproduce.figures.sheet import Numbers, Picture, footer, need_rows, publish
from dpl.reproduce.gather import gather
from dpl.reproduce.layouts import Row
from dpl.reproduce.request import Request, Result
from dpl.reproduce.style import axes, colour
from dpl.reproduce.targets import experiment_file, register

__all__ = ["ORDER", "TITLE", "Panels", "draw", "make_figure4", "panels"]

TITLE = "Figure 4: accuracy over batch sizes"
ORDER = ("tent", "pl", "tsd", "dpl_star", "dpl")
"""The paper's order of methods."""
_CLAIM = (
    "PL, TENT and TSD lose much accuracy as the batch gets smaller, DPL* and DPL lose little; the memory helps DPL "
    "over DPL*, most on TerraIncognita."
)

Panels = Mapping[str, Mapping[str, Line]]
"""Data set, or target of the only one -> method -> its line over batch sizes."""


def make_figure4(request: Request) -> Result:
    """Run or resume the experiment and draw it."""
    gathered = gather(experiment_file("fig4", request.config), request)
    rows = need_rows("fig4", gathered, request)
    found = panels(rows)
    picture = Picture(draw(found, footer(gathered, rows)), _alt(found), _numbers(found), _data(found))
    return publish("fig4", TITLE, _CLAIM, picture, gathered, request)


def panels(rows: Sequence[Row]) -> dict[str, dict[str, Line]]:
    """Return the lines of every panel, methods in the paper's order, then those it lacks."""
    of_label = {row["label"]: (row["method"], row["batch_size"]) for row in rows}
    found: dict[str, dict[str, dict[int, Mapping[int, float]]]] = {}
    for (label, group), series in series_of(rows).items():
        method, size = of_label[label]
        found.setdefault(group, {}).setdefault(method, {})[size] = series.values
    return {
        group: {m: Line(dict(sorted(lines[m].items()))) for m in (*ORDER, *lines) if m in lines}
        for group, lines in found.items()
    }


def sizes(found: Panels) -> list[int]:
    """Return every batch size that occurs."""
    return sorted({size for lines in found.values() for line in lines.values() for size in line.points})


def draw(found: Panels, note: str = "") -> Any:
    """Draw one panel for each group, one line for each method."""
    order = sizes(found)
    figure, grid = axes(1, len(found), width=0.8 + 3.9 * len(found), height=4.0)
    for axis, (group, lines) in zip(grid.flat, found.items(), strict=True):
        for index, (method, line) in enumerate(lines.items()):
            draw_line(
                axis, order, line, colour=colour(method, index), marker=MARKERS.get(method, "x"),
                linestyle="-" if method.startswith("dpl") else "--", label=NAMES.get(method, method),
            )  # fmt: skip
        ticks(axis, order)
        axis.set_title(NAMES.get(group, group))
        axis.set_xlabel("batch size")
        axis.set_ylabel("accuracy (%)")
    fullest = max(grid.flat, key=lambda axis: len(axis.get_legend_handles_labels()[1]))
    figure.legend(*fullest.get_legend_handles_labels(), loc="outside upper center", ncols=6, frameon=False)
    figure.supxlabel(note, fontsize=8, color="#555555")
    return figure


def _numbers(found: Panels) -> Numbers:
    order = sizes(found)
    rows = [
        (f"{group}, {method}", *(f"{line.mean(x):.1f}" if x in line.points else "–" for x in order))
        for group, lines in found.items()
        for method, line in lines.items()
    ]
    return Numbers(("accuracy % at batch size", *map(str, order)), tuple(rows))


def _alt(found: Panels) -> str:
    order = sizes(found)
    return f"Accuracy over batch sizes {', '.join(map(str, order))} of " + "; ".join(
        f"{group}: " + ", ".join(f"{method} {_ends(line)}" for method, line in lines.items())
        for group, lines in found.items()
    )


def _ends(line: Line) -> str:
    first, *_, last = [*line.points, *line.points]
    return f"{line.mean(first):.1f} at {first}, {line.mean(last):.1f} at {last}"


def _data(found: Panels) -> dict[str, Any]:
    return {
        group: {m: {str(x): dict(seeds) for x, seeds in line.points.items()} for m, line in lines.items()}
        for group, lines in found.items()
    }


register("fig4", "accuracy over batch sizes", make_figure4)
