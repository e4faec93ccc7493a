"""Figure 1: cumulative accuracy while the stream goes on, cross-entropy on pseudo-labels against DPL."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpl.bench import Store, Unit
from dpl.reproduce.curves import end_labels
from dpl.reproduce.figures.lines import NAMES, draw_band
from dpl.reproduce.figures.sheet import Numbers, Picture, finished, footer, need_rows, publish
from dpl.reproduce.gather import gather
from dpl.reproduce.request import Request, Result
from dpl.reproduce.style import axes, colour
from dpl.reproduce.targets import experiment_file, register

__all__ = ["TITLE", "Curves", "cumulative", "draw", "make_figure1"]

TITLE = "Figure 1: cumulative accuracy of cross-entropy and DPL while they adapt"
_CLAIM = (
    "on cartoon (59 iterations) and sketch (99), the cumulative accuracy of the cross-entropy loss keeps falling while "
    "it adapts, that of DPL does not."
)
_NAMES = NAMES | {"pl": "CE (PL)"}

Curves = Mapping[str, Mapping[str, Mapping[int, NDArray[np.float64]]]]
"""Target -> method -> seed -> percent after each iteration."""


def make_figure1(request: Request) -> Result:
    """Run or resume the experiment and draw it."""
    gathered = gather(experiment_file("fig1", request.config), request)
    rows = need_rows("fig1", gathered, request)
    curves: dict[str, dict[str, dict[int, NDArray[np.float64]]]] = {}
    for case, unit in finished(gathered):
        by_method = curves.setdefault(unit.domains[0], {})
        by_method.setdefault(case.label, {})[case.seed] = cumulative(gathered.store, unit)
    picture = _picture(curves, footer(gathered, rows))
    return publish("fig1", TITLE, _CLAIM, picture, gathered, request)


def cumulative(store: Store, unit: Unit) -> NDArray[np.float64]:
    """Return the accuracy over all images so far, after each batch."""
    found = store.predictions(unit)
    correct = np.cumsum(found["prediction"] == found["label"])
    ends = np.minimum(np.arange(1, -(-len(correct) // unit.batch_size) + 1) * unit.batch_size, len(correct))
    return np.asarray(100.0 * correct[ends - 1] / ends, dtype=np.float64)


def draw(curves: Curves, note: str = "") -> Any:
    """Draw one panel for each target."""
    figure, grid = axes(1, len(curves), width=0.6 + 4.2 * len(curves), height=3.5)
    for axis, (target, methods) in zip(grid.flat, curves.items(), strict=True):
        _panel(axis, methods)
        axis.set_title(_NAMES.get(target, target))
        axis.set_xlabel("iterations")
        axis.set_ylabel("cumulative accuracy (%)")
    figure.supxlabel(note, fontsize=8, color="#555555")
    return figure


def _panel(axis: Any, methods: Mapping[str, Mapping[int, NDArray[np.float64]]]) -> None:
    ends = []
    for index, (method, runs) in enumerate(methods.items()):
        shade, length = colour(method, index), min(map(len, runs.values()))
        stacked = np.stack([run[:length] for run in runs.values()])
        iterations = list(range(1, length + 1))
        draw_band(axis, iterations, stacked.T.tolist(), shade)
        dashes = {"linestyle": (0, (5, 2))} if method == "source" else {}
        axis.plot(iterations, stacked.mean(0), color=shade, linewidth=2, label=_NAMES.get(method, method), **dashes)
        ends.append((float(stacked[:, -1].mean()), _NAMES.get(method, method), shade))
    end_labels(axis, ends, 0.06)
    axis.margins(x=0.01)


def _picture(curves: Curves, note: str) -> Picture:
    methods = list(dict.fromkeys(method for by_method in curves.values() for method in by_method))
    places = [("at the end", -1), ("after a quarter", None)]
    rows = []
    for target, by_method in curves.items():
        for told, place in places:
            values = [_figure(by_method.get(method), place) for method in methods]
            rows.append((f"{target}, {told}", *values))
    data = {
        target: {m: {str(seed): run.tolist() for seed, run in runs.items()} for m, runs in by_method.items()}
        for target, by_method in curves.items()
    }
    ends = "; ".join(f"{row[0]}: " + ", ".join(map(" ".join, zip(methods, row[1:], strict=True))) for row in rows[::2])
    return Picture(
        draw(curves, note),
        f"Cumulative accuracy in percent over iterations. {ends}.",
        Numbers(("cumulative accuracy %", *methods), tuple(rows)),
        data,
    )


def _figure(runs: Mapping[int, NDArray[np.float64]] | None, place: int | None) -> str:
    if not runs:
        return "–"
    values = [run[len(run) // 4 if place is None else place] for run in runs.values()]
    return f"{np.mean(values):.1f}" + (f" ({min(values):.1f} to {max(values):.1f})" if len(values) > 1 else "")


register("fig1", "cumulative accuracy over the stream, CE against DPL", make_figure1)
