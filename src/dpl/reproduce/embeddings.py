"""Figures 2 and 3 of the paper: features and styles inside the networks, placed on paper by t-SNE."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dpl.bench import BenchContext, Unit, run_unit
from dpl.bench.images import open_parts, segment_batches
from dpl.core.errors import DataError
from dpl.core.extras import optional
from dpl.core.files import replacing
from dpl.network import Network
from dpl.network.style_layer import at_layer, find_style_layer, prefix_tokens
from dpl.objectives import style_statistics
from dpl.reproduce.document import Item
from dpl.reproduce.figures import NAMES, footer, measured_on, require_rows, write_figure
from dpl.reproduce.layouts import Row
from dpl.reproduce.plan import Experiment, image_context, open_quietly, run_experiment
from dpl.reproduce.plotting import axes, colour
from dpl.reproduce.render import Picture
from dpl.reproduce.request import Request, Result
from dpl.reproduce.targets import experiment_file, register
from dpl.streams import plan

__all__ = [
    "Features", "Styles", "Target", "cached", "collect_features", "collect_styles", "draw_features", "draw_styles",
    "farther", "make_figure2", "make_figure3", "misplaced", "nearest_distance", "neighbour_accuracy", "standardised",
    "subset", "tsne",
]  # fmt: skip

Arrays = dict[str, NDArray[Any]]
Points = NDArray[np.float32]
_DIMENSIONS, _PERPLEXITY = 50, 30.0
_NEIGHBOURS = 5


# ---- What a network computes inside, kept beside the results ----


def cached(folder: Path, unit: Unit, kind: str, make: Callable[[], Arrays] | None) -> Arrays | None:
    """Return the arrays stored for a unit; absent ones are made and stored, or None where nothing may be run."""
    path = folder / f"{unit.key}.{kind}.npz"
    if path.is_file():
        try:
            with np.load(path, allow_pickle=False) as archive:
                return {name: archive[name] for name in archive.files}
        except (OSError, ValueError) as error:
            raise DataError(f"{path}: cannot be read ({error}); remove it to have it made again") from error
    if make is None:
        return None
    arrays = make()
    with replacing(path) as draft, draft.open("wb") as file:
        np.savez_compressed(file, **arrays)  # type: ignore[arg-type]
    return arrays


def collect_features(unit: Unit, context: BenchContext) -> Arrays:
    """Adapt to the whole stream, then return the features of every image under the adapted network."""
    model = context.prepared(unit, open_parts(unit, context)).model
    run_unit(unit, context)  # adapts this very model, which the context keeps, from its source state to the end
    found: dict[str, list[NDArray[Any]]] = {"features": [], "label": []}
    for images, labels in _batches(unit, context):
        with torch.no_grad():
            found["features"].append(model.method.network(images).z.half().numpy())
        found["label"].append(labels.numpy())
    return {name: np.concatenate(parts) for name, parts in found.items()}


def collect_styles(unit: Unit, context: BenchContext) -> Arrays:
    """Return the style of each image under the source network (Eq. 8 and 9), and the network's confidence."""
    network = context.prepared(unit, open_parts(unit, context)).model.method.network
    layer, prefix = find_style_layer(network.module), prefix_tokens(network.module)
    found: dict[str, list[NDArray[Any]]] = {"style": [], "confidence": []}
    for images, _ in _batches(unit, context):
        style, confidence = _styles(network, images, layer, prefix)
        found["style"].append(style.numpy())
        found["confidence"].append(confidence.numpy())
    return {name: np.concatenate(parts) for name, parts in found.items()}


@torch.no_grad()
def _styles(network: Network, images: Tensor, layer: str, prefix: int) -> tuple[Tensor, Tensor]:
    seen: list[Tensor] = []

    def record(maps: Tensor) -> Tensor:
        mean, deviation = style_statistics(maps[:, prefix:] if maps.ndim == 3 else maps)
        seen.append(torch.cat([mean.flatten(1), deviation.flatten(1)], dim=1))
        return maps

    with at_layer(network.module, layer, record):
        out = network(images)
    return seen[-1].float(), out.probabilities.max(dim=1).values


def _batches(unit: Unit, context: BenchContext) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the unit's images again, in order of arrival."""
    parts = open_parts(unit, context)
    domains = [part.domain for part in parts]
    for segment in plan(unit.protocol, domains, seed=unit.seed, order=unit.order, delta=unit.delta, visits=unit.visits):
        for batch in segment_batches(segment, parts, unit, context):
            if len(batch):
                yield batch.images.contiguous(memory_format=torch.channels_last), batch.labels


# ---- Many dimensions on paper, and how well classes are told apart before t-SNE bends the distances ----


def subset(size: int, most: int) -> NDArray[np.int64]:
    """Return at most `most` positions, drawn by the size alone: the same ones for every method."""
    if size <= most:
        return np.arange(size, dtype=np.int64)
    return np.sort(np.random.default_rng([0, size]).permutation(size)[:most]).astype(np.int64)


def tsne(points: Points, seed: int = 0) -> NDArray[np.float64]:
    """Return two coordinates for each point, from its first principal components."""
    decomposition: Any = optional("sklearn.decomposition", "bench")
    manifold: Any = optional("sklearn.manifold", "bench")
    values = np.asarray(points, dtype=np.float64)
    if min(values.shape) > _DIMENSIONS:
        values = decomposition.PCA(_DIMENSIONS, random_state=seed).fit_transform(values)
    perplexity = min(_PERPLEXITY, (len(values) - 1) / 3)
    placed = manifold.TSNE(2, perplexity=perplexity, init="pca", random_state=seed).fit_transform(values)
    return np.asarray(placed, dtype=np.float64)


def standardised(points: Points) -> Points:
    """Return each dimension with mean 0 and deviation 1; a constant one becomes 0."""
    spread = points.std(0)
    return np.asarray((points - points.mean(0)) / np.where(spread > 0, spread, 1), dtype=np.float32)


def neighbour_accuracy(points: Points, labels: NDArray[np.int64]) -> float:
    """Return in percent how often a point's nearest others, by cosine, vote for its true class."""
    unit = points / np.maximum(np.linalg.norm(points, axis=1, keepdims=True), 1e-12)
    closeness = unit @ unit.T
    np.fill_diagonal(closeness, -np.inf)
    count = min(_NEIGHBOURS, len(labels) - 1)
    nearest = labels[np.argpartition(-closeness, count - 1, axis=1)[:, :count]]
    votes = (nearest[:, :, None] == np.arange(labels.max() + 1)).sum(1)
    return float(100.0 * (votes.argmax(1) == labels).mean())


def nearest_distance(points: Points, others: Points) -> NDArray[np.float64]:
    """Return for each point the mean distance to its nearest few of the others."""
    squares = (points**2).sum(1)[:, None] + (others**2).sum(1) - 2 * points @ others.T
    count = min(_NEIGHBOURS, len(others))
    nearest = np.partition(np.maximum(squares, 0), count - 1, axis=1)[:, :count]
    return np.asarray(np.sqrt(nearest).mean(1), dtype=np.float64)


def _frame(axis: Any, *, present: bool) -> None:
    """Make a panel for points that have no scale, and say so if there are none."""
    axis.set(xticks=[], yticks=[])
    axis.grid(False)
    axis.spines[:].set_visible(True)
    axis.spines[:].set_color("#bbbbbb")
    if not present:
        axis.text(0.5, 0.5, "not run", transform=axis.transAxes, ha="center", color="#555555")


# ---- Figure 2: features and predicted classes ----

_FIGURE2 = "Figure 2: features and predicted classes of the source model, cross-entropy and DPL"
_FIGURE2_CLAIM = (
    "(a) features of the seven classes stay entangled under cross-entropy, as in the source model, and come apart "
    "under DPL; (b) the classes that DPL predicts follow the true counts more closely than those of cross-entropy."
)
_METHODS = ("source", "pl", "dpl")
_FIGURE2_NAMES = NAMES | {"pl": "CE (PL)", "truth": "GT"}
_CLASS_COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#222222")
_CLASS_MARKERS = "os^Dv<P"
_MOST_POINTS = 1000
_TRUTH = "#444444"

Counts = Mapping[str, Mapping[int, NDArray[np.int64]]]
"""`truth` or method -> seed -> images of each class."""


@dataclass(frozen=True)
class Features:
    """The features of one method: places on paper, true classes, and how often neighbours share the class."""

    places: NDArray[np.float64]
    labels: NDArray[np.int64]
    neighbours: float


@dataclass(frozen=True)
class Target:
    """One row of the figure."""

    name: str
    features: Mapping[str, Features]
    counts: Counts


def make_figure2(request: Request) -> Result:
    """Run or resume the experiment, collect features of the adapted networks, and draw."""
    experiment = run_experiment(experiment_file("fig1", request.config), request, _METHODS)
    rows = require_rows("fig2", experiment, request)
    context = image_context(experiment.plan, request) if request.run else None
    names = dict.fromkeys(unit.domains[0] for _, unit in experiment.finished())
    targets = [Target(name, _features(experiment, name, context, request), _counts(experiment, name)) for name in names]
    experiment = replace(experiment, missing=(*experiment.missing, *_not_collected(targets)))
    note = footer(experiment, "(a) the first, (b) their mean and, as whiskers, their range")
    picture = _features_picture(targets, _classes(request, rows[0]), note)
    return write_figure("fig2", _FIGURE2, picture, experiment, request)


def _not_collected(targets: list[Target]) -> list[Item]:
    """Name the methods whose runs are stored without their features."""
    lacking = [f"{t.name} ({m})" for t in targets for m in t.counts if m in _METHODS and m not in t.features]
    return [Item("features", f"not collected: {', '.join(lacking)}; run again without --no-run")] if lacking else []


def _classes(request: Request, row: Row) -> tuple[str, ...]:
    """Return the names of the classes; their numbers where the images are not there."""
    try:
        return tuple(open_quietly(row["dataset"], request.data).classes)
    except DataError:
        return tuple(map(str, range(len(row["per_class"]))))


def _features(
    experiment: Experiment, target: str, context: BenchContext | None, request: Request
) -> dict[str, Features]:
    """Return the features of each method with its first seed."""
    found: dict[str, Features] = {}
    for cell, unit in experiment.finished():
        if unit.domains[0] != target or cell.label in found:
            continue
        make = None if context is None else partial(collect_features, unit, context)
        arrays = cached(request.store / "figures", unit, "features", make)
        if arrays is not None:
            chosen = subset(len(arrays["label"]), _MOST_POINTS)
            points, labels = arrays["features"][chosen].astype(np.float32), arrays["label"][chosen].astype(np.int64)
            found[cell.label] = Features(tsne(points), labels, neighbour_accuracy(points, labels))
    return found


def _counts(experiment: Experiment, target: str) -> dict[str, dict[int, NDArray[np.int64]]]:
    """Return how many images each class has, by the labels and by the predictions of each method."""
    found: dict[str, dict[int, NDArray[np.int64]]] = {"truth": {}}
    for cell, unit in experiment.finished():
        if unit.domains[0] == target:
            arrays = experiment.store.predictions(unit)
            classes = len(experiment.store.records(unit)[0]["per_class"])
            found["truth"][cell.seed] = np.bincount(arrays["label"].astype(np.int64), minlength=classes)
            predicted = np.bincount(arrays["prediction"].astype(np.int64), minlength=classes)
            found.setdefault(cell.label, {})[cell.seed] = predicted
    return found


def misplaced(counts: Counts, method: str) -> float:
    """Return in percent how many images would have to change class for the method's counts to be the true ones."""
    shares = [
        0.5 * np.abs(found - counts["truth"][seed]).sum() / counts["truth"][seed].sum()
        for seed, found in counts[method].items()
    ]
    return float(100.0 * np.mean(shares))


def draw_features(targets: list[Target], classes: tuple[str, ...], note: str = "") -> Any:
    """Draw one row for each target: the features of three methods, then a histogram of classes."""
    figure, grid = axes(len(targets), 4, width=12.6, height=0.9 + 2.9 * len(targets))
    for row, target in zip(grid, targets, strict=True):
        for axis, method in zip(row, _METHODS, strict=False):
            _scatter_classes(axis, target.features.get(method), classes)
            axis.set_title(_FIGURE2_NAMES[method])
        row[0].set_ylabel(NAMES.get(target.name, target.name), fontsize=12)
        _histogram(row[3], target.counts, classes)
    grid[0][0].annotate("(a)", (0, 1.1), xycoords="axes fraction", fontweight="bold")
    grid[0][3].annotate("(b)", (-0.12, 1.1), xycoords="axes fraction", fontweight="bold")
    drawn = [axis for axis in grid[:, :3].flat if axis.get_legend_handles_labels()[1]]
    if drawn:
        handles = drawn[0].get_legend_handles_labels()
        figure.legend(*handles, loc="outside lower center", ncols=7, frameon=False, markerscale=2)
    figure.suptitle(note, fontsize=8, color="#555555")
    return figure


def _scatter_classes(axis: Any, features: Features | None, classes: tuple[str, ...]) -> None:
    _frame(axis, present=features is not None)
    if features is None:
        return
    for number, name in enumerate(classes):
        chosen = features.labels == number
        axis.scatter(
            *features.places[chosen].T, s=9, alpha=0.75, linewidths=0, label=name, rasterized=True,
            color=_CLASS_COLOURS[number % 7], marker=_CLASS_MARKERS[number % 7],
        )  # fmt: skip
    axis.set_xlabel(f"true class among neighbours: {features.neighbours:.0f} %", fontsize=8.5)


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
            color=_TRUTH if name == "truth" else colour(name), label=_FIGURE2_NAMES[name],
            error_kw={"elinewidth": 0.8, "ecolor": "#000000"}, **whiskers,
        )  # fmt: skip
    axis.set_xticks(range(len(classes)), classes, rotation=40, ha="right", fontsize=9)
    axis.set_ylabel("number of samples")
    axis.legend(
        frameon=False, fontsize=9, ncols=3, loc="lower center", bbox_to_anchor=(0.5, 1.0), handlelength=1.2,
        columnspacing=1.0,
    )  # fmt: skip


def _features_picture(targets: list[Target], classes: tuple[str, ...], note: str) -> Picture:
    rows = []
    for target in targets:
        for method in [name for name in _METHODS if name in target.counts]:
            features = target.features.get(method)
            near = "–" if features is None else f"{features.neighbours:.1f}"
            rows.append((f"{target.name}, {method}", near, f"{misplaced(target.counts, method):.1f}"))
    summary = "; ".join(f"{name}: neighbours {near} %, excess {excess} %" for name, near, excess in rows)
    counts = {
        target.name: {m: {str(seed): c.tolist() for seed, c in by.items()} for m, by in target.counts.items()}
        for target in targets
    }
    return Picture(
        figure=draw_features(targets, classes, note),
        alt=f"t-SNE of features and counts of predicted classes. {summary}.",
        headers=("", "features: true class among 5 neighbours %", "predicted counts: images in excess %"),
        rows=tuple(rows),
        data={"counts": counts},
        claim=_FIGURE2_CLAIM,
    )


# ---- Figure 3: styles of source domains and of confident and unconfident target images ----

_FIGURE3 = "Figure 3: styles at the first stage"
_FIGURE3_CLAIM = (
    "the styles of confident target images lie near those of the source domains, the styles of unconfident ones lie "
    "apart from them."
)
_CONFIDENCE = 0.9
_MOST_SOURCE, _MOST_TARGET = 200, 600
_SOURCE_COLOURS = ("#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#999933")
_TARGET = {"confident": ("#b2182b", "^"), "unconfident": ("#0072b2", "x")}


@dataclass(frozen=True)
class Styles:
    """Styles around one target domain: of each source domain, and of the target's images with their confidence."""

    target: str
    sources: Mapping[str, Points]
    styles: Points
    confident: NDArray[np.bool_]

    def groups(self) -> list[str]:
        """Return the group of each row of `points`."""
        names = [name for name, styles in self.sources.items() for _ in styles]
        return names + ["confident" if sure else "unconfident" for sure in self.confident]

    def points(self) -> Points:
        """Return all styles, each dimension on one scale."""
        return standardised(np.concatenate([*self.sources.values(), self.styles]))

    def distances(self) -> dict[str, NDArray[np.float64]]:
        """Return how far confident and unconfident target images are from their nearest source styles."""
        points = self.points()
        start = len(points) - len(self.styles)
        far = nearest_distance(points[start:], points[:start])
        return {"confident": far[self.confident], "unconfident": far[~self.confident]}


def make_figure3(request: Request) -> Result:
    """Run the source model over target and source images and draw their styles."""
    experiment = run_experiment(experiment_file("fig1", request.config), request, ("source",))
    rows = require_rows("fig3", experiment, request)
    context = image_context(experiment.plan, request) if request.run else None
    units: dict[str, Unit] = {}
    for _, unit in experiment.finished():
        units.setdefault(unit.domains[0], unit)  # the first seed of each target
    found = [styles for unit in units.values() if (styles := _target_styles(unit, context, request)) is not None]
    shown = f"at most {_MOST_TARGET} target images and {_MOST_SOURCE} held out of each source domain are shown"
    note = f"{measured_on(rows)}; {shown if found else 'styles were not collected: run without --no-run'}"
    return write_figure("fig3", _FIGURE3, _styles_picture(found, note), experiment, request)


def _target_styles(unit: Unit, context: BenchContext | None, request: Request) -> Styles | None:
    """Return the styles around one target, None where they are not stored and nothing may be run."""

    def styles_of(at: Unit) -> Arrays | None:
        make = None if context is None else partial(collect_styles, at, context)
        return cached(request.store / "figures", at, "styles", make)

    held_out = {
        name: styles_of(replace(unit, domains=(name,), part="outside", limit=_MOST_SOURCE)) for name in unit.trained_on
    }
    target = styles_of(unit)
    sources = {name: arrays["style"] for name, arrays in held_out.items() if arrays is not None}
    if target is None or len(sources) < len(held_out):
        return None
    chosen = subset(len(target["style"]), _MOST_TARGET)
    return Styles(unit.domains[0], sources, target["style"][chosen], target["confidence"][chosen] > _CONFIDENCE)


def farther(distances: Mapping[str, NDArray[np.float64]]) -> float | None:
    """Return in percent how often an unconfident image is farther from the source than a confident one."""
    if not all(map(len, distances.values())):
        return None
    return float(100.0 * (distances["unconfident"][:, None] > distances["confident"]).mean())


def draw_styles(found: list[Styles], note: str = "") -> Any:
    """Draw the styles around each target."""
    figure, grid = axes(1, max(len(found), 1), width=9.6, height=4.2)
    names = sorted({name for styles in found for name in styles.sources})
    colours = {name: _SOURCE_COLOURS[place % len(_SOURCE_COLOURS)] for place, name in enumerate(names)}
    for number, axis in enumerate(grid[0]):
        _scatter_styles(axis, found[number] if found else None, colours)
    figure.supxlabel(note, fontsize=8, color="#555555")
    return figure


def _scatter_styles(axis: Any, styles: Styles | None, colours: Mapping[str, str]) -> None:
    _frame(axis, present=styles is not None)
    if styles is None:
        return
    places, groups = tsne(styles.points()), np.array(styles.groups())
    looks = {name: (colours[name], "o") for name in styles.sources} | _TARGET
    for name, (shade, marker) in looks.items():
        chosen = groups == name
        label = f"{name} target" if name in _TARGET else NAMES.get(name, name)
        axis.scatter(
            *places[chosen].T, s=14 if name in _TARGET else 10, marker=marker, color=shade, rasterized=True,
            alpha=0.9 if name in _TARGET else 0.6, linewidths=0.9 if marker == "x" else 0,
            label=f"{label} ({int(chosen.sum())})",
        )  # fmt: skip
    axis.set_title(f"target: {NAMES.get(styles.target, styles.target)}")
    axis.legend(loc="upper left", bbox_to_anchor=(0, -0.02), ncols=2, frameon=False, fontsize=8.5, markerscale=1.6)


def _styles_picture(found: list[Styles], note: str) -> Picture:
    rows, data = [], {}
    for styles in found:
        distances = styles.distances()
        medians = [f"{np.median(d):.2f} ({len(d)})" if len(d) else "– (0)" for d in distances.values()]
        share = farther(distances)
        rows.append((styles.target, *medians, "–" if share is None else f"{share:.0f} %"))
        data[styles.target] = {name: far.tolist() for name, far in distances.items()}
    summary = "; ".join(f"{row[0]}: unconfident farther in {row[3]} of pairs" for row in rows)
    return Picture(
        figure=draw_styles(found, note),
        alt=f"t-SNE of style statistics. {summary}",
        headers=(
            "target",
            "confident: distance to source styles (images)",
            "unconfident",
            "unconfident one is farther",
        ),
        rows=tuple(rows),
        data=data,
        claim=_FIGURE3_CLAIM,
    )


register("fig2", "features (t-SNE) and predicted classes of source, CE and DPL", make_figure2)
register("fig3", "styles of source and target images (t-SNE)", make_figure3)
