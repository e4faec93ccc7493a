"""Figure 5: sensitivity to tau, eta, beta and to the range of updated parameters."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dpl.core.errors import DataError
from dpl.network.scope import SCOPES
from dpl.reproduce.figures.lines import NAMES, Line, draw_line, series_of, ticks
from dpl.reproduce.figures.sheet import Numbers, Picture, footer, need_rows, publish
from dpl.reproduce.gather import gather
from dpl.reproduce.layouts import Row
from dpl.reproduce.request import Request, Result
from dpl.reproduce.style import axes
from dpl.reproduce.targets import experiment_file, register

__all__ = ["PANELS", "TITLE", "Panel", "Panels", "draw", "make_figure5", "panels"]

TITLE = "Figure 5: sensitivity of DPL to its settings"
_CLAIM = (
    "DPL is robust to tau, eta and beta; the more parameters are updated, the worse PL gets, while DPL is best with "
    "all of them."
)
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
_MARKERS = "osD^vP"
_LEAST_SPAN = 10.0  # percent points


@dataclass(frozen=True)
class Panel:
    """One panel: the word that its labels begin with, the setting on its x axis, and what is written there."""

    word: str
    setting: str
    xlabel: str


PANELS = (
    Panel("tau", "temperature", r"(a) temperature $\tau$"),
    Panel("eta", "momentum", r"(b) momentum $\eta$"),
    Panel("beta", "reg_weight", r"(c) weight $\beta$"),
    Panel("range", "scope", "(d) updated parameters"),
)
"""In the paper's order."""
_RANGES = dict(zip(SCOPES, ("BN", "classifier", "features", "all"), strict=True))

Panels = Mapping[str, Mapping[tuple[str, str], Line]]
"""Word of the panel -> (data set or target, method) -> line."""


def make_figure5(request: Request) -> Result:
    """Run or resume the experiment and draw it."""
    gathered = gather(experiment_file("fig5", request.config), request)
    rows = need_rows("fig5", gathered, request)
    found = panels(rows)
    picture = Picture(draw(found, footer(gathered, rows)), _alt(found), _numbers(found), _data(found))
    return publish("fig5", TITLE, _CLAIM, picture, gathered, request)


def panels(rows: Sequence[Row]) -> dict[str, dict[tuple[str, str], Line]]:
    """Return the lines of every panel; a row belongs to the panel whose word its label begins with."""
    of_label = {row["label"]: row for row in rows}
    found: dict[str, dict[tuple[str, str], dict[Any, Mapping[int, float]]]] = {panel.word: {} for panel in PANELS}
    for (label, group), series in series_of(rows).items():
        row = of_label[label]
        panel = next((panel for panel in PANELS if label.split()[0] == panel.word), None)
        if panel is None or panel.setting not in row["settings"]:
            words = ", ".join(f"{p.word} ({p.setting})" for p in PANELS)
            raise DataError(f"fig5: the label {label!r} begins with no panel's name: {words}; rename it in the file")
        lines = found[panel.word].setdefault((group, row["method"]), {})
        lines[row["settings"][panel.setting]] = series.values
    return {word: {key: Line(points) for key, points in lines.items()} for word, lines in found.items()}


def order_of(panel: Panel, lines: Mapping[tuple[str, str], Line]) -> list[Any]:
    """Return the values on a panel's x axis: numbers rising, ranges from few parameters to all."""
    values = {x for line in lines.values() for x in line.points}
    return [scope for scope in SCOPES if scope in values] if panel.setting == "scope" else sorted(values)


def draw(found: Panels, note: str = "") -> Any:
    """Draw the four panels beside each other: DPL solid, PL dashed."""
    figure, grid = axes(1, len(PANELS), width=12.0, height=3.6)
    groups = list(dict.fromkeys(group for lines in found.values() for group, _ in lines))
    for axis, panel in zip(grid.flat, PANELS, strict=True):
        _panel(axis, panel, found.get(panel.word, {}), groups)
    _same_scale(grid.flat[:3])
    grid.flat[0].set_ylabel("accuracy (%)")
    handles = dict(zip(*reversed(grid.flat[-1].get_legend_handles_labels()), strict=True))
    for axis in grid.flat[:-1]:
        handles |= {k: h for h, k in zip(*axis.get_legend_handles_labels(), strict=True) if k not in handles}
    figure.legend(handles.values(), handles.keys(), loc="outside upper center", ncols=8, frameon=False)
    figure.supxlabel(note, fontsize=8, color="#555555")
    return figure


def _same_scale(panels: Any) -> None:
    """Give the settings' panels one scale, so that a flat line is flat because the setting matters little."""
    limits = [axis.get_ylim() for axis in panels if axis.lines]
    if limits:
        low, high = min(low for low, _ in limits), max(high for _, high in limits)
        room = max(0.0, _LEAST_SPAN - (high - low)) / 2
        for axis in panels:
            axis.set_ylim(low - room, high + room)


def _panel(axis: Any, panel: Panel, lines: Mapping[tuple[str, str], Line], groups: Sequence[str]) -> None:
    axis.set_xlabel(panel.xlabel)
    if not lines:
        axis.text(0.5, 0.5, "not run", transform=axis.transAxes, ha="center", color="#555555")
        return
    order = order_of(panel, lines)
    for (group, method), line in lines.items():
        place = groups.index(group) % len(_COLOURS)
        draw_line(
            axis, order, line, colour=_COLOURS[place], marker=_MARKERS[place],
            linestyle="--" if method == "pl" else "-", markerfacecolor="white" if method == "pl" else None,
            label=f"{NAMES.get(group, group)}, {NAMES.get(method, method)}",
        )  # fmt: skip
    ticks(axis, order, _RANGES if panel.setting == "scope" else None)


def _numbers(found: Panels) -> Numbers:
    rows = []
    for panel in PANELS:
        for (group, method), line in found[panel.word].items():
            order = order_of(panel, found[panel.word])
            values = ", ".join(f"{_value(x)}: {line.mean(x):.1f}" for x in order if x in line.points)
            rows.append((f"{panel.word}, {group}, {method}", values))
    return Numbers(("setting, stream, method", "value: accuracy %"), tuple(rows))


def _value(x: Any) -> str:
    return _RANGES.get(x) or f"{x:g}"


def _alt(found: Panels) -> str:
    groups = dict.fromkeys(group for lines in found.values() for group, _ in lines)
    return (
        f"Accuracy on {', '.join(groups)} over tau, eta, beta and the updated parameters, DPL solid and PL dashed; the "
        "numbers are in the table below."
    )


def _data(found: Panels) -> dict[str, Any]:
    return {
        word: {
            f"{group} {method}": {str(x): dict(seeds) for x, seeds in line.points.items()}
            for (group, method), line in lines.items()
        }
        for word, lines in found.items()
    }


register("fig5", "sensitivity to tau, eta, beta and the range of updated parameters", make_figure5)
