"""Figures 1, 4 and 5 of the paper: accuracy over the stream, over batch sizes, over settings."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from dpl.core.errors import DataError
from dpl.reproduce.compare import seed_means
from dpl.reproduce.document import Picture, differences, how_measured, write
from dpl.reproduce.paper import PLACES, Layout, Row
from dpl.reproduce.plan import Experiment, Request, Result, run_experiment
from dpl.reproduce.plotting import LOOK, NOTE, axes, colour, draw_line, draw_runs, not_run, save_figure

__all__ = [
    "LOSS_NAMES", "NAMES", "footer", "make_figure1", "make_figure4", "make_figure5", "measured_on", "write_figure",
]  # fmt: skip

NAMES: Mapping[str, str] = LOOK["names"]
LOSS_NAMES: Mapping[str, str] = LOOK["names"] | LOOK["names_by_loss"]
Curves = dict[str, dict[str, dict[int, NDArray[np.float64]]]]  # target -> method -> seed -> percent by iteration
# Of figures 4 and 5: group (data set, or target of the only one) and method -> a row by seed, a column by x.
Lines = Mapping[tuple[str, str], pd.DataFrame]
Panels = Mapping[str, Lines]
Look = Callable[[str, str], dict[str, Any]]  # returns how the line of a group and a method is drawn
_LAYOUT = Layout(PLACES["set"], networks={"": "resnet50"})  # the network of every figure
_LEAST_SPAN = 10.0  # percentage points


def write_figure(name: str, picture: Picture, experiment: Experiment) -> Result:
    """Write a figure in all formats, its page and its data."""
    out, words = experiment.request.out, LOOK["figures"][name]
    rows = [{**row, "label": row["method"]} for row in experiment.rows]  # settings by method: labels are values of x
    facts = {"title": words["title"], "differences": differences(rows, _LAYOUT), **how_measured(rows)}
    document = experiment.request.document(rows, experiment.missing, name=name, **facts)
    files = save_figure(picture.figure, out, name), write(document, out, replace(picture, claim=words["claim"]))
    return Result((*files[0], *files[1]), document, experiment.missing, experiment.failed)


def measured_on(rows: Sequence[Row]) -> str:
    """Return the network and the number of images behind a figure."""
    images = sorted({row["n"] for row in rows})
    count = f"{images[0]:,}" if len(images) == 1 else f"{images[0]:,} to {images[-1]:,}"
    return f"{rows[0]['network']}, {count} images of each stream"


def footer(experiment: Experiment, spread: str = "their mean, band: their range") -> str:
    """Return the line below a figure: what was measured, with how many seeds, and whether something is missing."""
    seeds = len({row["seed"] for row in experiment.rows})
    text = f"{measured_on(experiment.rows)}; {'one seed' if seeds == 1 else f'{seeds} seeds: {spread}'}"
    done, planned = len(experiment.finished()), len(experiment.cells)
    if done == planned and not experiment.missing:
        return text
    return f"{text}\nPartial: {done} of {planned} runs; what is missing is listed beside the figure"


def make_figure1(request: Request) -> Result:
    """Run or resume the experiment and draw it."""
    experiment = run_experiment("fig1", request)
    curves: Curves = {}
    for cell, unit in experiment.finished():
        found = experiment.store.predictions(unit)
        correct = np.cumsum(found["prediction"] == found["label"])
        seen = np.append(np.arange(unit.batch_size, len(correct), unit.batch_size), len(correct))
        by_method = curves.setdefault(unit.domains[0], {})
        by_method.setdefault(cell.label, {})[cell.seed] = 100.0 * correct[seen - 1] / seen  # after each batch
    methods = list(dict.fromkeys(method for by_method in curves.values() for method in by_method))
    rows = [
        (f"{target}, {words}", *(_mean_and_range(by_method.get(method, {}), part) for method in methods))
        for target, by_method in curves.items()
        for words, part in (("at the end", 1.0), ("after a quarter", 0.25))
    ]
    ends = [f"{target}: " + ", ".join(map(" ".join, zip(methods, last, strict=True))) for target, *last in rows[::2]]
    alt = f"Cumulative accuracy in percent over iterations. {'; '.join(ends)}."
    figure = draw_cumulative(curves, footer(experiment))
    return write_figure("fig1", Picture(figure, alt, ("cumulative accuracy %", *methods), rows, curves), experiment)


def _mean_and_range(runs: Mapping[int, NDArray[np.float64]], part: float) -> str:
    """Return the mean over seeds and their range after a part of the stream."""
    if not runs:
        return "–"
    values = [run[min(int(len(run) * part), len(run) - 1)] for run in runs.values()]
    return f"{np.mean(values):.1f}" + (f" ({min(values):.1f} to {max(values):.1f})" if len(values) > 1 else "")


def draw_cumulative(curves: Curves, note: str = "") -> Any:
    """Draw one panel for each target."""
    figure, grid = axes(1, len(curves), width=0.6 + 4.2 * len(curves), height=3.5)
    for axis, (target, methods) in zip(grid.flat, curves.items(), strict=True):
        draw_runs(axis, {method: list(runs.values()) for method, runs in methods.items()}, LOSS_NAMES)
        axis.set(title=NAMES.get(target, target), xlabel="iterations", ylabel="cumulative accuracy (%)")
    figure.supxlabel(note, **NOTE)
    return figure


def _make(
    name: str, panels_of: Callable[[Sequence[Row]], Panels], draw: Callable[[Panels, str], Any], what: str,
    request: Request,
) -> Result:  # fmt: skip
    """Run or resume the experiment and draw it."""
    experiment = run_experiment(name, request)
    panels = panels_of(experiment.rows)
    rows, data = [], {}
    for panel, lines in panels.items():
        data[panel] = {" ".join(key): {x: line[x].dropna().to_dict() for x in line} for key, line in lines.items()}
        for key, line in lines.items():
            values = ", ".join(f"{_value_name(x)}: {line[x].mean():.1f}" for x in line)
            rows.append((", ".join(dict.fromkeys((panel, *key))), values))
    alt = f"{what}. " + "; ".join(f"{name}: {values}" for name, values in rows)
    picture = Picture(draw(panels, footer(experiment)), alt, ("line", "value: accuracy %"), rows, data)
    return write_figure(name, picture, experiment)


def _panels(rows: Sequence[Row], panel_of: Callable[[Row, str], str], x_of: Callable[[Row], Any]) -> Panels:
    """Return lines over `x_of(row)`, one for each method and data set; for each target where there is one data set."""
    several = len({row["dataset"] for row in rows}) > 1
    by_label = {row["label"]: row for row in rows}
    lines: dict[tuple[str, str, str], dict[Any, Any]] = {}
    found = seed_means(rows, lambda row: (row["dataset"] if several else row["domains"][0], row["domains"][0]))
    for (label, group), means in found.items():
        row = by_label[label]
        lines.setdefault((panel_of(row, group), group, row["method"]), {})[x_of(row)] = means.values
    panels: dict[str, dict[tuple[str, str], pd.DataFrame]] = {}
    for (panel, group, method), line in lines.items():
        panels.setdefault(panel, {})[group, method] = pd.DataFrame(line)[_x_order(line)]
    return panels


def _x_order(values: Iterable[Any]) -> list[Any]:
    """Return the values of x in rising order, ranges of parameters from few to all."""
    found = set(values)
    return [scope for scope in LOOK["ranges"] if scope in found] or sorted(found)


def _value_name(x: Any) -> str:
    return str(LOOK["ranges"][x]) if isinstance(x, str) else f"{x:g}"


def _draw_panels(panels: Panels, words: Sequence[Mapping[str, str]], look: Look, width: float, note: str) -> Any:
    """Draw panels beside each other, each with its title or names of axes; values of x are equally spaced."""
    figure, grid = axes(1, len(panels), width=width, height=3.8)
    for axis, lines, texts in zip(grid.flat, panels.values(), words, strict=True):
        order = _x_order(x for line in lines.values() for x in line)
        for key, line in lines.items():
            present = [x for x in order if x in line]
            places = [order.index(x) for x in present]
            draw_line(axis, places, line[present].to_numpy(), linewidth=1.8, markersize=5, **look(*key))
        axis.set_xticks(range(len(order)), [_value_name(x) for x in order])
        axis.set(**texts, xlim=(-0.3, max(len(order), 1) - 0.7))
        if not lines:
            not_run(axis)
    shown = [axis.get_legend_handles_labels() for axis in figure.axes[::-1]]  # of figure 5, the last has both methods
    handles = {label: handle for found in shown for handle, label in zip(*found, strict=True)}
    columns = min(8, int(width / 1.5))
    figure.legend(handles.values(), handles.keys(), loc="outside upper center", ncols=columns, frameon=False)
    figure.supxlabel(note, **NOTE)
    return figure


def batch_size_lines(rows: Sequence[Row]) -> Panels:
    """Return a panel for each group, methods in the paper's order, then those it lacks."""
    order = list(dict.fromkeys((*LOOK["markers"], *(row["method"] for row in rows))))
    found = _panels(rows, lambda row, group: group, lambda row: row["batch_size"])
    return {g: dict(sorted(lines.items(), key=lambda line: order.index(line[0][1]))) for g, lines in found.items()}


def draw_batch_sizes(panels: Panels, note: str = "") -> Any:
    """Draw one panel for each group, one line for each method."""
    methods = list(dict.fromkeys(method for lines in panels.values() for _, method in lines))

    def look(group: str, method: str) -> dict[str, Any]:
        return {
            "color": colour(method, methods.index(method)), "marker": LOOK["markers"].get(method, "x"),
            "linestyle": "-" if method.startswith("dpl") else "--", "label": NAMES.get(method, method),
        }  # fmt: skip

    words = [{"title": NAMES.get(g, g), "xlabel": "batch size", "ylabel": "accuracy (%)"} for g in panels]
    return _draw_panels(panels, words, look, 0.8 + 3.9 * len(panels), note)


def _sensitivity_lines(rows: Sequence[Row]) -> Panels:
    """Return a panel for each setting, from the rows whose labels begin with its word."""
    settings = {word: panel["setting"] for word, panel in LOOK["panels"].items()}
    rows = [{**row, "word": row["label"].split()[0]} for row in rows]
    for row in rows:
        if settings.get(row["word"]) not in row["settings"]:
            words = ", ".join(f"{word} ({setting})" for word, setting in settings.items())
            raise DataError(
                f"fig5: the label {row['label']!r} begins with no panel's name: {words}; rename it in the file"
            )
    found = _panels(rows, lambda row, _: row["word"], lambda row: row["settings"][settings[row["word"]]])
    return {word: found.get(word, {}) for word in settings}


def draw_sensitivity(panels: Panels, note: str = "") -> Any:
    """Draw the four panels beside each other: DPL solid, PL dashed."""
    groups = list(dict.fromkeys(group for lines in panels.values() for group, _ in lines))

    def look(group: str, method: str) -> dict[str, Any]:
        place = groups.index(group) % len(LOOK["groups"])
        dashed = {"linestyle": "--", "markerfacecolor": "white"} if method == "pl" else {}
        label = f"{NAMES.get(group, group)}, {NAMES.get(method, method)}"
        return {"color": LOOK["groups"][place], "marker": "osD^vP"[place], "label": label, **dashed}

    words = [{"xlabel": panel["xlabel"]} for panel in LOOK["panels"].values()]
    figure = _draw_panels({word: panels.get(word, {}) for word in LOOK["panels"]}, words, look, 12.0, note)
    figure.axes[0].set_ylabel("accuracy (%)")
    limits = [axis.get_ylim() for axis in figure.axes[:3] if axis.lines]
    if limits:  # one scale for the settings' panels, so that a flat line is flat because the setting matters little
        low, high = min(low for low, _ in limits), max(high for _, high in limits)
        room = max(0.0, _LEAST_SPAN - (high - low)) / 2
        for axis in figure.axes[:3]:
            axis.set_ylim(low - room, high + room)
    return figure


make_figure4 = partial(_make, "fig4", batch_size_lines, draw_batch_sizes, "Accuracy over batch sizes")
make_figure5 = partial(
    _make, "fig5", _sensitivity_lines, draw_sensitivity,
    "Accuracy over tau, eta, beta and the updated parameters, DPL solid and PL dashed",
)  # fmt: skip
