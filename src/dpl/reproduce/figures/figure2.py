"""Figure 2: (a) features of the source model, after cross-entropy and after DPL; (b) predicted classes."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpl.bench import Unit
from dpl.core.errors import DataError
from dpl.data import open_benchmark
from dpl.reproduce.document import Item
from dpl.reproduce.figures.embed import frame, neighbour_accuracy, subset, tsne
from dpl.reproduce.figures.inside import Arrays, kept, look_at_features
from dpl.reproduce.figures.lines import NAMES
from dpl.reproduce.figures.sheet import Numbers, Picture, finished, footer, image_context, need_rows, publish
from dpl.reproduce.gather import Gathered, gather
from dpl.reproduce.request import Request, Result
from dpl.reproduce.style import axes, colour
from dpl.reproduce.targets import experiment_file, register

__all__ = ["TITLE", "Clouds", "Counts", "Target", "draw", "make_figure2", "predicted"]

TITLE = "Figure 2: features and predicted classes of the source model, cross-entropy and DPL"
_CLAIM = (
    "(a) features of the seven classes stay entangled under cross-entropy, as in the source model, and come apart "
    "under DPL; (b) the classes that DPL predicts follow the true counts more closely than those of cross-entropy."
)
_METHODS = ("source", "pl", "dpl")
_NAMES = NAMES | {"pl": "CE (PL)", "truth": "GT"}
_CLASS_COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#222222")
_CLASS_MARKERS = "os^Dv<P"
_MOST_POINTS = 1000
_TRUTH = "#444444"
_SPREAD = "(a) the first, (b) their mean and, as whiskers, their range"

Counts = Mapping[str, Mapping[int, NDArray[np.int64]]]
"""`truth` or method -> seed -> images of each class."""


@dataclass(frozen=True)
class Clouds:
    """The features of one method: places on paper, true classes, and how well neighbours tell the class."""

    places: NDArray[np.float64]
    labels: NDArray[np.int64]
    neighbours: float


@dataclass(frozen=True)
class Target:
    """One row of the figure."""

    name: str
    clouds: Mapping[str, Clouds]
    counts: Counts


def make_figure2(request: Request) -> Result:
    """Run or resume the experiment, look into the adapted networks, and draw."""
    path = experiment_file("fig1", request.config)
    gathered = gather(path, request, _METHODS)
    rows = need_rows("fig2", gathered, request)
    context = image_context(path, request) if request.run else None

    def features(unit: Unit) -> Arrays | None:
        make = None if context is None else partial(look_at_features, unit, context)
        return kept(request.store / "figures", unit, "features", make)

    names = dict.fromkeys(unit.domains[0] for _, unit in finished(gathered))
    targets = [Target(name, _clouds(gathered, name, features), _counts(gathered, name)) for name in names]
    gathered = replace(gathered, missing=(*gathered.missing, *_not_looked_at(targets)))
    picture = _picture(targets, _class_names(request, rows[0]), footer(gathered, rows, _SPREAD))
    return publish("fig2", TITLE, _CLAIM, picture, gathered, request)


def _not_looked_at(targets: list[Target]) -> list[Item]:
    """Name the networks whose features are missing: their runs are stored, but nobody has looked inside."""
    lacking = [f"{t.name} ({name})" for t in targets for name in t.counts if name in _METHODS and name not in t.clouds]
    return [Item("features", f"not looked at: {', '.join(lacking)}; run again without --no-run")] if lacking else []


def _class_names(request: Request, row: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of the classes; their numbers where the images are not at hand."""
    try:
        return tuple(open_benchmark(row["dataset"], request.data).classes)
    except DataError:
        return tuple(map(str, range(len(row["per_class"]))))


def _clouds(gathered: Gathered, target: str, features: Any) -> dict[str, Clouds]:
    """Return the features of each method with its first seed."""
    found: dict[str, Clouds] = {}
    for case, unit in finished(gathered):
        if unit.domains[0] != target or case.label in found or (arrays := features(unit)) is None:
            continue
        chosen = subset(len(arrays["label"]), _MOST_POINTS)
        points, labels = arrays["features"][chosen].astype(np.float32), arrays["label"][chosen].astype(np.int64)
        found[case.label] = Clouds(tsne(points), labels, neighbour_accuracy(points, labels))
    return found


def _counts(gathered: Gathered, target: str) -> dict[str, dict[int, NDArray[np.int64]]]:
    found: dict[str, dict[int, NDArray[np.int64]]] = {"truth": {}}
    for case, unit in finished(gathered):
        if unit.domains[0] == target:
            arrays = gathered.store.predictions(unit)
            classes = len(gathered.store.records(unit)[0]["per_class"])
            found["truth"][case.seed] = predicted(arrays["label"], classes)
            found.setdefault(case.label, {})[case.seed] = predicted(arrays["prediction"], classes)
    return found


def predicted(labels: NDArray[Any], classes: int) -> NDArray[np.int64]:
    """Return how many images each class was given."""
    return np.bincount(labels.astype(np.int64), minlength=classes)


def misplaced(counts: Counts, method: str) -> float:
    """Return in percent how many images would have to change class for the method's counts to be the true ones."""
    shares = [
        0.5 * np.abs(found - counts["truth"][seed]).sum() / counts["truth"][seed].sum()
        for seed, found in counts[method].items()
    ]
    return float(100.0 * np.mean(shares))


def draw(targets: list[Target], classes: tuple[str, ...], note: str = "") -> Any:
    """Draw one row for each target: three clouds, one histogram."""
    figure, grid = axes(len(targets), 4, width=12.6, height=0.9 + 2.9 * len(targets))
    for row, target in zip(grid, targets, strict=True):
        for axis, method in zip(row, _METHODS, strict=False):
            _cloud(axis, target.clouds.get(method), classes)
            axis.set_title(_NAMES[method])
        row[0].set_ylabel(_NAMES.get(target.name, target.name), fontsize=12)
        _histogram(row[3], target.counts, classes)
    grid[0][0].annotate("(a)", (0, 1.1), xycoords="axes fraction", fontweight="bold")
    grid[0][3].annotate("(b)", (-0.12, 1.1), xycoords="axes fraction", fontweight="bold")
    first = next((axis for axis in grid[:, :3].flat if axis.get_legend_handles_labels()[1]), None)
    if first is not None:
        handles = first.get_legend_handles_labels()
        figure.legend(*handles, loc="outside lower center", ncols=7, frameon=False, markerscale=2)
    figure.suptitle(note, fontsize=8, color="#555555")
    return figure


def _cloud(axis: Any, cloud: Clouds | None, classes: tuple[str, ...]) -> None:
    frame(axis, there=cloud is not None)
    if cloud is None:
        return
    for number, name in enumerate(classes):
        chosen = cloud.labels == number
        axis.scatter(
            *cloud.places[chosen].T, s=9, alpha=0.75, linewidths=0, label=name, rasterized=True,
            color=_CLASS_COLOURS[number % 7], marker=_CLASS_MARKERS[number % 7],
        )  # fmt: skip
    axis.set_xlabel(f"true class among neighbours: {cloud.neighbours:.0f} %", fontsize=8.5)


def _histogram(axis: Any, counts: Counts, classes: tuple[str, ...]) -> None:
    """Draw the bars of each method beside the true ones; the range of several seeds as a whisker."""
    members = [name for name in ("truth", *_METHODS[1:]) if counts.get(name)]
    width = 0.8 / max(len(members), 1)
    for place, name in enumerate(members):
        stacked = np.stack(list(counts[name].values()))
        mean = stacked.mean(0)
        whiskers = {"yerr": np.stack([mean - stacked.min(0), stacked.max(0) - mean])} if len(stacked) > 1 else {}
        axis.bar(
            np.arange(len(classes)) + (place - (len(members) - 1) / 2) * width, mean, width,
            color=_TRUTH if name == "truth" else colour(name), label=_NAMES[name],
            error_kw={"elinewidth": 0.8, "ecolor": "#000000"}, **whiskers,
        )  # fmt: skip
    axis.set_xticks(range(len(classes)), classes, rotation=40, ha="right", fontsize=9)
    axis.set_ylabel("number of samples")
    axis.legend(
        frameon=False, fontsize=9, ncols=3, loc="lower center", bbox_to_anchor=(0.5, 1.0), handlelength=1.2,
        columnspacing=1.0,
    )  # fmt: skip


def _picture(targets: list[Target], classes: tuple[str, ...], note: str) -> Picture:
    rows = []
    for target in targets:
        for method in [name for name in _METHODS if name in target.counts]:
            cloud = target.clouds.get(method)
            near = "–" if cloud is None else f"{cloud.neighbours:.1f}"
            rows.append((f"{target.name}, {method}", near, f"{misplaced(target.counts, method):.1f}"))
    headers = ("", "features: true class among 5 neighbours %", "predicted counts: images in excess %")
    told = "; ".join(f"{name}: neighbours {near} %, excess {excess} %" for name, near, excess in rows)
    data = {
        target.name: {m: {str(seed): c.tolist() for seed, c in by.items()} for m, by in target.counts.items()}
        for target in targets
    }
    alt = f"t-SNE of features and counts of predicted classes. {told}."
    return Picture(draw(targets, classes, note), alt, Numbers(headers, tuple(rows)), {"counts": data})


register("fig2", "features (t-SNE) and predicted classes of source, CE and DPL", make_figure2)
