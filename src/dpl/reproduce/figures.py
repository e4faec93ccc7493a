"""Figures 1, 4 and 5 of the paper: accuracy over the stream, over batch sizes, over settings."""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from dpl.bench import Store, Unit
from dpl.bench.selection import complete
from dpl.core.errors import DataError
from dpl.network.scope import SCOPES
from dpl.reproduce.compare import seed_means
from dpl.reproduce.layouts import PLACES, Layout, Row
from dpl.reproduce.plan import Experiment, nothing_measured, run_experiment
from dpl.reproduce.plotting import axes, colour, draw_band, draw_runs, save_figure
from dpl.reproduce.render import Picture, write_page
from dpl.reproduce.targets import Request, Result, experiment_file

__all__ = [
    "NAMES", "NOTE", "PANELS", "Lines", "Panels", "batch_size_lines", "cumulative", "draw_batch_sizes",
    "draw_cumulative", "draw_sensitivity", "footer", "make_figure1", "make_figure4", "make_figure5", "measured_on",
    "not_run", "run_figure", "sensitivity_lines", "write_figure",
]  # fmt: skip

NAMES = {
    "source": "Source", "tent": "TENT", "pl": "PL", "tsd": "TSD", "dpl_o": "DPL$^o$", "dpl_star": "DPL*", "dpl": "DPL",
    "dpl_dagger": "DPL$^†$", "art_painting": "art painting",
}  # fmt: skip
"""Of methods and domains, as the paper writes them."""
NOTE: Mapping[str, Any] = {"fontsize": 8, "color": "#555555"}
_LAYOUT = Layout(PLACES["set"], networks={"": "resnet50"})  # the network of every figure


# ---- What all figures share ----


def run_figure(name: str, request: Request, file: str = "", only: Collection[str] | None = None) -> Experiment:
    """Run or resume the experiment of a figure; raise an error that says why if nothing was measured."""
    experiment = run_experiment(experiment_file(file or name, request.config), request, only)
    if not experiment.rows:
        raise nothing_measured(name, request, experiment.missing)
    return experiment


def write_figure(name: str, title: str, picture: Picture, experiment: Experiment, request: Request) -> Result:
    """Write a figure in all formats, its page and its data."""
    rows = [{**row, "label": row["method"]} for row in experiment.rows]  # settings by method: labels are values of x
    document = request.document(name, title, rows, _LAYOUT, experiment.missing)
    files = (*save_figure(picture.figure, request.out, name), *write_page(document, picture, request.out))
    return Result(files, document, experiment.failed, experiment.missing)


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
    cells = experiment.cells
    done = sum(complete(cell, experiment.store) for cell in cells)
    if done == len(cells) and not experiment.missing:
        return text
    return f"{text}\nPartial: {done} of {len(cells)} runs; what is missing is listed beside the figure"


def not_run(axis: Any) -> None:
    """Say in an empty panel why it is empty."""
    axis.text(0.5, 0.5, "not run", transform=axis.transAxes, ha="center", color="#555555")


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
    experiment = run_figure("fig1", request)
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
        axis.set(title=NAMES.get(target, target), xlabel="iterations", ylabel="cumulative accuracy (%)")
    figure.supxlabel(note, **NOTE)
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


# ---- Figures 4 and 5: panels of lines over a setting ----

Lines = Mapping[tuple[str, str], pd.DataFrame]
"""Group (data set, or target of the only one) and method -> a row for each seed, a column for each x."""
Panels = Mapping[str, Lines]

_RANGES = dict(zip(SCOPES, ("BN", "classifier", "features", "all"), strict=True))


def _group_of(rows: Sequence[Row]) -> Callable[[Row], str]:
    """Return what tells lines apart: the data set; if there is only one, its target domain."""
    several = len({row["dataset"] for row in rows}) > 1
    return lambda row: str(row["dataset"] if several else row["domains"][0])


def _lines(rows: Sequence[Row], group_of: Callable[[Row], str], x_of: Callable[[Row], Any]) -> Lines:
    """Return the lines of rows over `x_of(row)`; each value is a mean over the streams of its group."""
    by_label = {row["label"]: row for row in rows}
    points: dict[tuple[str, str], dict[Any, Any]] = {}
    for (label, group), means in seed_means(rows, Layout(lambda row: (group_of(row), row["domains"][0]))).items():
        row = by_label[label]
        points.setdefault((group, row["method"]), {})[x_of(row)] = means.values
    lines = {key: pd.DataFrame(line) for key, line in points.items()}
    return {key: line[[x for x in _x_order(lines) if x in line]] for key, line in lines.items()}


def _x_order(lines: Lines) -> list[Any]:
    """Return the values of x in rising order, ranges of parameters from few to all."""
    values = {x for line in lines.values() for x in line}
    return [scope for scope in SCOPES if scope in values] or sorted(values)


def _value_name(x: Any) -> str:
    return _RANGES[x] if isinstance(x, str) else f"{x:g}"


def _draw_panel(axis: Any, lines: Lines, look: Callable[[str, str], dict[str, Any]]) -> None:
    """Draw each line over equally spaced values: the mean over seeds, their range as a band."""
    order = _x_order(lines)
    for key, line in lines.items():
        present, style = line[[x for x in order if x in line]], look(*key)
        places = [order.index(x) for x in present]
        draw_band(axis, places, present.min(), present.max(), style["color"])
        axis.plot(places, present.mean(), linewidth=1.8, markersize=5, **style)
    axis.set_xticks(range(len(order)), [_value_name(x) for x in order])
    axis.set_xlim(-0.3, len(order) - 0.7)


def _add_legend(figure: Any, grid: Any, columns: int) -> None:
    handles: dict[str, Any] = {}
    for axis in (grid.flat[-1], *grid.flat[:-1]):  # of figure 5, the last panel has both methods
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    figure.legend(handles.values(), handles.keys(), loc="outside upper center", ncols=columns, frameon=False)


def _lines_picture(figure: Any, panels: Panels, what: str, claim: str) -> Picture:
    """Return a drawing of lines with its numbers."""
    lines = {(panel, *key): line for panel, found in panels.items() for key, line in found.items()}
    rows = tuple(
        (", ".join(dict.fromkeys(key)), ", ".join(f"{_value_name(x)}: {line[x].mean():.1f}" for x in line))
        for key, line in lines.items()
    )
    data: dict[str, dict[str, Any]] = {panel: {} for panel in panels}
    for (panel, group, method), line in lines.items():
        data[panel][f"{group} {method}"] = {str(x): line[x].dropna().to_dict() for x in line}
    alt = f"{what}. " + "; ".join(f"{name}: {values}" for name, values in rows)
    return Picture(figure, alt, ("line", "value: accuracy %"), rows, data, claim)


# ---- Figure 4: accuracy over batch sizes ----

_FIGURE4 = "Figure 4: accuracy over batch sizes"
_FIGURE4_CLAIM = (
    "PL, TENT and TSD lose much accuracy as the batch gets smaller, DPL* and DPL lose little; the memory helps DPL "
    "over DPL*, most on TerraIncognita."
)
_MARKERS = {"tent": "o", "pl": "s", "tsd": "^", "dpl_star": "D", "dpl": "v"}  # in the paper's order


def make_figure4(request: Request) -> Result:
    """Run or resume the experiment and draw it."""
    experiment = run_figure("fig4", request)
    panels = batch_size_lines(experiment.rows)
    figure = draw_batch_sizes(panels, footer(experiment))
    picture = _lines_picture(figure, panels, "Accuracy over batch sizes", _FIGURE4_CLAIM)
    return write_figure("fig4", _FIGURE4, picture, experiment, request)


def batch_size_lines(rows: Sequence[Row]) -> dict[str, Lines]:
    """Return a panel for each group, methods in the paper's order, then those it lacks."""
    found = _lines(rows, _group_of(rows), lambda row: row["batch_size"])
    methods = dict.fromkeys((*_MARKERS, *(method for _, method in found)))
    groups = dict.fromkeys(group for group, _ in found)
    return {group: {(group, m): found[group, m] for m in methods if (group, m) in found} for group in groups}


def draw_batch_sizes(panels: Panels, note: str = "") -> Any:
    """Draw one panel for each group, one line for each method."""
    methods = list(dict.fromkeys(method for lines in panels.values() for _, method in lines))

    def look(group: str, method: str) -> dict[str, Any]:
        return {
            "color": colour(method, methods.index(method)), "marker": _MARKERS.get(method, "x"),
            "linestyle": "-" if method.startswith("dpl") else "--", "label": NAMES.get(method, method),
        }  # fmt: skip

    figure, grid = axes(1, len(panels), width=0.8 + 3.9 * len(panels), height=4.0)
    for axis, (group, lines) in zip(grid.flat, panels.items(), strict=True):
        _draw_panel(axis, lines, look)
        axis.set(title=NAMES.get(group, group), xlabel="batch size", ylabel="accuracy (%)")
    _add_legend(figure, grid, columns=6)
    figure.supxlabel(note, **NOTE)
    return figure


# ---- Figure 5: sensitivity to settings ----

_FIGURE5 = "Figure 5: sensitivity of DPL to its settings"
_FIGURE5_CLAIM = (
    "DPL is robust to tau, eta and beta; the more parameters are updated, the worse PL gets, while DPL is best with "
    "all of them."
)
_GROUP_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
_GROUP_MARKERS = "osD^vP"
_LEAST_SPAN = 10.0  # percentage points


class Panel(NamedTuple):
    """One panel: the setting on its x axis, and the name of that axis."""

    setting: str
    xlabel: str


PANELS = {
    "tau": Panel("temperature", r"(a) temperature $\tau$"),
    "eta": Panel("momentum", r"(b) momentum $\eta$"),
    "beta": Panel("reg_weight", r"(c) weight $\beta$"),
    "range": Panel("scope", "(d) updated parameters"),
}
"""In the paper's order, by the word that the labels of their rows begin with."""


def make_figure5(request: Request) -> Result:
    """Run or resume the experiment and draw it."""
    experiment = run_figure("fig5", request)
    panels = sensitivity_lines(experiment.rows)
    figure = draw_sensitivity(panels, footer(experiment))
    what = "Accuracy over tau, eta, beta and the updated parameters, DPL solid and PL dashed"
    return write_figure("fig5", _FIGURE5, _lines_picture(figure, panels, what, _FIGURE5_CLAIM), experiment, request)


def sensitivity_lines(rows: Sequence[Row]) -> dict[str, Lines]:
    """Return the lines of every panel; a row belongs to the panel whose word its label begins with."""
    members: dict[str, list[Row]] = {word: [] for word in PANELS}
    for row in rows:
        word = row["label"].split()[0]
        if word not in PANELS or PANELS[word].setting not in row["settings"]:
            words = ", ".join(f"{word} ({panel.setting})" for word, panel in PANELS.items())
            raise DataError(
                f"fig5: the label {row['label']!r} begins with no panel's name: {words}; rename it in the file"
            )
        members[word].append(row)

    def value_of(setting: str) -> Callable[[Row], Any]:
        return lambda row: row["settings"][setting]

    return {
        word: _lines(found, _group_of(rows), value_of(PANELS[word].setting)) if found else {}
        for word, found in members.items()
    }


def draw_sensitivity(panels: Panels, note: str = "") -> Any:
    """Draw the four panels beside each other: DPL solid, PL dashed."""
    groups = list(dict.fromkeys(group for lines in panels.values() for group, _ in lines))

    def look(group: str, method: str) -> dict[str, Any]:
        place = groups.index(group) % len(_GROUP_COLOURS)
        dashed = {"linestyle": "--", "markerfacecolor": "white"} if method == "pl" else {}
        label = f"{NAMES.get(group, group)}, {NAMES.get(method, method)}"
        return {"color": _GROUP_COLOURS[place], "marker": _GROUP_MARKERS[place], "label": label, **dashed}

    figure, grid = axes(1, len(PANELS), width=12.0, height=3.6)
    for axis, (word, panel) in zip(grid.flat, PANELS.items(), strict=True):
        axis.set_xlabel(panel.xlabel)
        if panels.get(word):
            _draw_panel(axis, panels[word], look)
        else:
            not_run(axis)
    _share_scale(grid.flat[:3])
    grid.flat[0].set_ylabel("accuracy (%)")
    _add_legend(figure, grid, columns=8)
    figure.supxlabel(note, **NOTE)
    return figure


def _share_scale(panels: Any) -> None:
    """Give the settings' panels one scale, so that a flat line is flat because the setting matters little."""
    limits = [axis.get_ylim() for axis in panels if axis.lines]
    if limits:
        low, high = min(low for low, _ in limits), max(high for _, high in limits)
        room = max(0.0, _LEAST_SPAN - (high - low)) / 2
        for axis in panels:
            axis.set_ylim(low - room, high + room)
