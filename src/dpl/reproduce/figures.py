"""Figures 1, 4 and 5 of the paper: accuracy over the stream, over batch sizes, over settings."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from dpl.bench import Store, Unit
from dpl.bench.selection import complete
from dpl.core.errors import DataError
from dpl.network.scope import SCOPES
from dpl.reproduce.compare import seed_means
from dpl.reproduce.document import Document, Setup, differences, protocol_items, setting_items, version_lines
from dpl.reproduce.layouts import FIGURES, Layout, Row
from dpl.reproduce.plan import Experiment, nothing_measured, run_experiment
from dpl.reproduce.plotting import axes, colour, draw_band, draw_runs, save_figure
from dpl.reproduce.render import Picture, write_page
from dpl.reproduce.request import Request, Result
from dpl.reproduce.targets import experiment_file, register

__all__ = [
    "NAMES", "PANELS", "Lines", "batch_size_lines", "cumulative", "draw_batch_sizes", "draw_cumulative",
    "draw_sensitivity", "footer", "make_figure1", "make_figure4", "make_figure5", "measured_on", "require_rows",
    "sensitivity_lines", "write_figure",
]  # fmt: skip

NAMES = {
    "source": "Source", "tent": "TENT", "pl": "PL", "tsd": "TSD", "dpl_o": "DPL$^o$", "dpl_star": "DPL*", "dpl": "DPL",
    "dpl_dagger": "DPL$^†$", "art_painting": "art painting",
}  # fmt: skip
"""Of methods and domains, as the paper writes them."""
_METHOD_MARKERS = {"tent": "o", "pl": "s", "tsd": "^", "dpl_star": "D", "dpl": "v"}
_NOTE = {"fontsize": 8, "color": "#555555"}


def require_rows(name: str, experiment: Experiment, request: Request) -> list[Row]:
    """Return the measured rows, or raise an error that says why there is none."""
    if not experiment.rows:
        raise nothing_measured(name, request, experiment.missing)
    return experiment.rows


def measured_on(rows: Sequence[Row]) -> str:
    """Return the network and the number of images behind a figure."""
    images = sorted({row["n"] for row in rows})
    count = f"{images[0]:,}" if len(images) == 1 else f"{images[0]:,} to {images[-1]:,}"
    return f"{rows[0]['network']}, {count} images of each stream"


def footer(experiment: Experiment, spread: str = "their mean, band: their range") -> str:
    """Return the line below a figure: what was measured, with how many seeds, and whether something is missing."""
    seeds = len({row["seed"] for row in experiment.rows})
    runs = "one seed" if seeds == 1 else f"{seeds} seeds: {spread}"
    text = f"{measured_on(experiment.rows)}; {runs}"
    cells = experiment.plan.cells
    done = sum(complete(cell, experiment.store) for cell in cells)
    if done == len(cells) and not experiment.missing:
        return text
    return f"{text}\nPartial: {done} of {len(cells)} runs; what is missing is listed beside the figure"


def write_figure(name: str, title: str, picture: Picture, experiment: Experiment, request: Request) -> Result:
    """Write a figure in all formats, its page and its data."""
    rows = [{**row, "label": row["method"]} for row in experiment.rows]  # settings by method: labels are values of x
    document = Document(
        name=name,
        title=title,
        caution=request.caution,
        differences=differences(rows, FIGURES),
        missing=request.anonymous_items(experiment.missing),
        setup=Setup(protocol_items(rows), setting_items(rows), version_lines(rows), request.anonymous(request.command)),
    )
    files = (*save_figure(picture.figure, request.out, name), *write_page(document, picture, request.out))
    return Result(files, document, experiment.failed, experiment.missing)


# ---- Figure 1: cumulative accuracy over the stream ----

_FIGURE1 = "Figure 1: cumulative accuracy of cross-entropy and DPL while they adapt"
_FIGURE1_CLAIM = (
    "on cartoon (59 iterations) and sketch (99), the cumulative accuracy of the cross-entropy loss keeps falling while "
    "it adapts, that of DPL does not."
)
_FIGURE1_NAMES = NAMES | {"pl": "CE (PL)"}

Curves = Mapping[str, Mapping[str, Mapping[int, NDArray[np.float64]]]]
"""Target -> method -> seed -> percent after each iteration."""


def make_figure1(request: Request) -> Result:
    """Run or resume the experiment and draw it."""
    experiment = run_experiment(experiment_file("fig1", request.config), request)
    require_rows("fig1", experiment, request)
    curves: dict[str, dict[str, dict[int, NDArray[np.float64]]]] = {}
    for cell, unit in experiment.finished():
        by_method = curves.setdefault(unit.domains[0], {})
        by_method.setdefault(cell.label, {})[cell.seed] = cumulative(experiment.store, unit)
    picture = _cumulative_picture(curves, footer(experiment))
    return write_figure("fig1", _FIGURE1, picture, experiment, request)


def cumulative(store: Store, unit: Unit) -> NDArray[np.float64]:
    """Return the accuracy over all images so far, after each batch."""
    found = store.predictions(unit)
    correct = np.cumsum(found["prediction"] == found["label"])
    ends = np.minimum(np.arange(1, -(-len(correct) // unit.batch_size) + 1) * unit.batch_size, len(correct))
    return np.asarray(100.0 * correct[ends - 1] / ends, dtype=np.float64)


def draw_cumulative(curves: Curves, note: str = "") -> Any:
    """Draw one panel for each target."""
    figure, grid = axes(1, len(curves), width=0.6 + 4.2 * len(curves), height=3.5)
    for axis, (target, methods) in zip(grid.flat, curves.items(), strict=True):
        draw_runs(axis, {method: list(runs.values()) for method, runs in methods.items()}, names=_FIGURE1_NAMES)
        axis.set_title(NAMES.get(target, target))
        axis.set_xlabel("iterations")
        axis.set_ylabel("cumulative accuracy (%)")
    figure.supxlabel(note, **_NOTE)
    return figure


def _cumulative_picture(curves: Curves, note: str) -> Picture:
    methods = list(dict.fromkeys(method for by_method in curves.values() for method in by_method))
    ends, rows = [], []
    for target, by_method in curves.items():
        last = [_mean_and_range(by_method.get(method, {}), 1.0) for method in methods]
        quarter = [_mean_and_range(by_method.get(method, {}), 0.25) for method in methods]
        rows += [(f"{target}, at the end", *last), (f"{target}, after a quarter", *quarter)]
        ends.append(f"{target}, at the end: " + ", ".join(map(" ".join, zip(methods, last, strict=True))))
    data = {
        target: {m: {str(seed): run.tolist() for seed, run in runs.items()} for m, runs in by_method.items()}
        for target, by_method in curves.items()
    }
    return Picture(
        figure=draw_cumulative(curves, note),
        alt=f"Cumulative accuracy in percent over iterations. {'; '.join(ends)}.",
        headers=("cumulative accuracy %", *methods),
        rows=tuple(rows),
        data=data,
        claim=_FIGURE1_CLAIM,
    )


def _mean_and_range(runs: Mapping[int, NDArray[np.float64]], part: float) -> str:
    """Return the mean over seeds and their range after a part of the stream."""
    if not runs:
        return "–"
    values = [run[min(int(len(run) * part), len(run) - 1)] for run in runs.values()]
    return f"{np.mean(values):.1f}" + (f" ({min(values):.1f} to {max(values):.1f})" if len(values) > 1 else "")


# ---- Figures 4 and 5: lines over a setting ----

Lines = Mapping[tuple[str, str], pd.DataFrame]
"""Data set (or target of the only one) and method -> a row for each seed, a column for each x."""


def _grouping(rows: Sequence[Row]) -> Callable[[Row], str]:
    """Return what tells lines apart: the data set; if there is only one, its target domain."""
    several = len({row["dataset"] for row in rows}) > 1
    return lambda row: str(row["dataset"] if several else row["domains"][0])


def _lines(
    rows: Sequence[Row], group_of: Callable[[Row], str], x_of: Callable[[Row], Any]
) -> dict[tuple[str, str], pd.DataFrame]:
    """Return the lines of rows over `x_of(row)`; each value is a mean over the streams of its group."""
    by_label = {row["label"]: row for row in rows}
    points: dict[tuple[str, str], dict[Any, Any]] = {}
    for (label, group), means in seed_means(rows, Layout(lambda row: (group_of(row), row["domains"][0]))).items():
        row = by_label[label]
        points.setdefault((group, row["method"]), {})[x_of(row)] = means.values
    return {key: pd.DataFrame(line) for key, line in points.items()}


def _draw_line(axis: Any, order: Sequence[Any], line: pd.DataFrame, *, shade: str, **look: Any) -> None:
    """Draw a line over equally spaced values: the mean over seeds, their range as a band; absent x are left out."""
    present = [x for x in order if x in line]
    places = [order.index(x) for x in present]
    draw_band(axis, places, line[present].min(), line[present].max(), shade)
    axis.plot(places, line[present].mean(), color=shade, linewidth=1.8, markersize=5, **look)


def _name_ticks(axis: Any, order: Sequence[Any]) -> None:
    """Name the equally spaced values below an axis."""
    axis.set_xticks(range(len(order)), [_value_name(x) for x in order])
    axis.set_xlim(-0.3, len(order) - 0.7)


def _value_name(x: Any) -> str:
    return _RANGES[x] if isinstance(x, str) else f"{x:g}"


def _line_data(line: pd.DataFrame) -> dict[str, dict[int, float]]:
    """Return every value of a line by x and seed."""
    return {str(x): {int(seed): float(y) for seed, y in line[x].dropna().items()} for x in line}  # type: ignore[call-overload]


# ---- Figure 4: accuracy over batch sizes ----

_FIGURE4 = "Figure 4: accuracy over batch sizes"
_FIGURE4_CLAIM = (
    "PL, TENT and TSD lose much accuracy as the batch gets smaller, DPL* and DPL lose little; the memory helps DPL "
    "over DPL*, most on TerraIncognita."
)
_FIGURE4_ORDER = ("tent", "pl", "tsd", "dpl_star", "dpl")


BatchSizePanels = Mapping[str, Mapping[str, pd.DataFrame]]
"""Data set (or target of the only one) -> method -> a row for each seed, a column for each batch size."""


def make_figure4(request: Request) -> Result:
    """Run or resume the experiment and draw it."""
    experiment = run_experiment(experiment_file("fig4", request.config), request)
    panels = batch_size_lines(require_rows("fig4", experiment, request))
    order = _batch_sizes(panels)
    ends = [
        f"{group}: " + ", ".join(f"{method} {_ends(line)}" for method, line in lines.items())
        for group, lines in panels.items()
    ]
    picture = Picture(
        figure=draw_batch_sizes(panels, footer(experiment)),
        alt=f"Accuracy over batch sizes {', '.join(map(str, order))} of {'; '.join(ends)}",
        headers=("accuracy % at batch size", *map(str, order)),
        rows=tuple(
            (f"{group}, {method}", *(f"{line[x].mean():.1f}" if x in line else "–" for x in order))
            for group, lines in panels.items()
            for method, line in lines.items()
        ),
        data={group: {method: _line_data(line) for method, line in lines.items()} for group, lines in panels.items()},
        claim=_FIGURE4_CLAIM,
    )
    return write_figure("fig4", _FIGURE4, picture, experiment, request)


def batch_size_lines(rows: Sequence[Row]) -> BatchSizePanels:
    """Return the lines over batch sizes of each panel, methods in the paper's order, then those it lacks."""
    found = _lines(rows, _grouping(rows), lambda row: row["batch_size"])
    groups = dict.fromkeys(group for group, _ in found)
    methods = dict.fromkeys((*_FIGURE4_ORDER, *(method for _, method in found)))
    return {
        group: {name: found[group, name].sort_index(axis=1) for name in methods if (group, name) in found}
        for group in groups
    }


def _batch_sizes(panels: BatchSizePanels) -> list[int]:
    return sorted({int(size) for lines in panels.values() for line in lines.values() for size in line.columns})


def _ends(line: pd.DataFrame) -> str:
    first, last = line.columns[0], line.columns[-1]
    return f"{line[first].mean():.1f} at {first}, {line[last].mean():.1f} at {last}"


def draw_batch_sizes(panels: BatchSizePanels, note: str = "") -> Any:
    """Draw one panel for each group, one line for each method."""
    order = _batch_sizes(panels)
    figure, grid = axes(1, len(panels), width=0.8 + 3.9 * len(panels), height=4.0)
    for axis, (group, lines) in zip(grid.flat, panels.items(), strict=True):
        for index, (method, line) in enumerate(lines.items()):
            _draw_line(
                axis, order, line, shade=colour(method, index), marker=_METHOD_MARKERS.get(method, "x"),
                linestyle="-" if method.startswith("dpl") else "--", label=NAMES.get(method, method),
            )  # fmt: skip
        _name_ticks(axis, order)
        axis.set_title(NAMES.get(group, group))
        axis.set_xlabel("batch size")
        axis.set_ylabel("accuracy (%)")
    fullest = max(grid.flat, key=lambda axis: len(axis.lines))
    figure.legend(*fullest.get_legend_handles_labels(), loc="outside upper center", ncols=6, frameon=False)
    figure.supxlabel(note, **_NOTE)
    return figure


# ---- Figure 5: sensitivity to settings ----

_FIGURE5 = "Figure 5: sensitivity of DPL to its settings"
_FIGURE5_CLAIM = (
    "DPL is robust to tau, eta and beta; the more parameters are updated, the worse PL gets, while DPL is best with "
    "all of them."
)
_RANGES = dict(zip(SCOPES, ("BN", "classifier", "features", "all"), strict=True))
_GROUP_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
_GROUP_MARKERS = "osD^vP"
_LEAST_SPAN = 10.0  # percentage points


@dataclass(frozen=True)
class Panel:
    """One panel: the word that its labels begin with, the setting on its x axis, and the name of that axis."""

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


def make_figure5(request: Request) -> Result:
    """Run or resume the experiment and draw it."""
    experiment = run_experiment(experiment_file("fig5", request.config), request)
    panels = sensitivity_lines(require_rows("fig5", experiment, request))
    groups = dict.fromkeys(group for lines in panels.values() for group, _ in lines)
    picture = Picture(
        figure=draw_sensitivity(panels, footer(experiment)),
        alt=f"Accuracy on {', '.join(groups)} over tau, eta, beta and the updated parameters, DPL solid and PL dashed; "
        "the numbers are in the table below.",
        headers=("setting, stream, method", "value: accuracy %"),
        rows=tuple(
            (f"{word}, {group}, {method}", ", ".join(f"{_value_name(x)}: {line[x].mean():.1f}" for x in line))
            for word, lines in panels.items()
            for (group, method), line in lines.items()
        ),
        data={
            word: {f"{group} {method}": _line_data(line) for (group, method), line in lines.items()}
            for word, lines in panels.items()
        },
        claim=_FIGURE5_CLAIM,
    )
    return write_figure("fig5", _FIGURE5, picture, experiment, request)


def sensitivity_lines(rows: Sequence[Row]) -> dict[str, Lines]:
    """Return the lines of every panel by its word; a row belongs to the panel whose word its label begins with."""
    members: dict[str, list[Row]] = {panel.word: [] for panel in PANELS}
    for row in rows:
        members[_panel_of(row).word].append(row)
    return {panel.word: _panel_lines(members[panel.word], panel, _grouping(rows)) for panel in PANELS}


def _panel_of(row: Row) -> Panel:
    for panel in PANELS:
        if row["label"].split()[0] == panel.word and panel.setting in row["settings"]:
            return panel
    words = ", ".join(f"{panel.word} ({panel.setting})" for panel in PANELS)
    raise DataError(f"fig5: the label {row['label']!r} begins with no panel's name: {words}; rename it in the file")


def _panel_lines(rows: Sequence[Row], panel: Panel, group_of: Callable[[Row], str]) -> Lines:
    """Return the lines of a panel, x in rising order, ranges of parameters from few to all."""
    found = _lines(rows, group_of, lambda row: row["settings"][panel.setting])
    order = _x_order(found)
    return {key: line[[x for x in order if x in line]] for key, line in found.items()}


def _x_order(lines: Lines) -> list[Any]:
    values = {x for line in lines.values() for x in line}
    scopes = [scope for scope in SCOPES if scope in values]
    return scopes or sorted(values)


def draw_sensitivity(panels: Mapping[str, Lines], note: str = "") -> Any:
    """Draw the four panels beside each other: DPL solid, PL dashed."""
    figure, grid = axes(1, len(PANELS), width=12.0, height=3.6)
    groups = list(dict.fromkeys(group for lines in panels.values() for group, _ in lines))
    for axis, panel in zip(grid.flat, PANELS, strict=True):
        _draw_panel(axis, panel, panels.get(panel.word, {}), groups)
    _share_scale(grid.flat[:3])
    grid.flat[0].set_ylabel("accuracy (%)")
    handles: dict[str, Any] = {}
    for axis in (grid.flat[-1], *grid.flat[:-1]):  # the last panel has both methods
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    figure.legend(handles.values(), handles.keys(), loc="outside upper center", ncols=8, frameon=False)
    figure.supxlabel(note, **_NOTE)
    return figure


def _share_scale(panels: Any) -> None:
    """Give the settings' panels one scale, so that a flat line is flat because the setting matters little."""
    limits = [axis.get_ylim() for axis in panels if axis.lines]
    if limits:
        low, high = min(low for low, _ in limits), max(high for _, high in limits)
        room = max(0.0, _LEAST_SPAN - (high - low)) / 2
        for axis in panels:
            axis.set_ylim(low - room, high + room)


def _draw_panel(axis: Any, panel: Panel, lines: Lines, groups: Sequence[str]) -> None:
    axis.set_xlabel(panel.xlabel)
    if not lines:
        axis.text(0.5, 0.5, "not run", transform=axis.transAxes, ha="center", color="#555555")
        return
    order = _x_order(lines)
    for (group, method), line in lines.items():
        place = groups.index(group) % len(_GROUP_COLOURS)
        _draw_line(
            axis, order, line, shade=_GROUP_COLOURS[place], marker=_GROUP_MARKERS[place],
            linestyle="--" if method == "pl" else "-", markerfacecolor="white" if method == "pl" else None,
            label=f"{NAMES.get(group, group)}, {NAMES.get(method, method)}",
        )  # fmt: skip
    _name_ticks(axis, order)


register("fig1", "cumulative accuracy over the stream, CE against DPL", make_figure1)
register("fig4", "accuracy over batch sizes", make_figure4)
register("fig5", "sensitivity to tau, eta, beta and the range of updated parameters", make_figure5)
