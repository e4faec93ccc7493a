"""Figures 2 and 3 of the paper: features and styles inside the networks, placed on paper by t-SNE."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from torch import Tensor

from dpl.bench import BenchContext, Unit, run_unit
from dpl.bench.images import UnitStream
from dpl.core.errors import DataError
from dpl.core.extras import optional
from dpl.core.files import replacing
from dpl.network.style_layer import find_style_layer, prefix_tokens
from dpl.objectives import style_statistics
from dpl.reproduce.document import Picture
from dpl.reproduce.figures import LOSS_NAMES, NAMES, footer, measured_on, write_figure
from dpl.reproduce.plan import Experiment, Request, Result, run_experiment
from dpl.reproduce.plotting import LOOK, NOTE, axes, colour, not_run

__all__ = ["make_figure2", "make_figure3", "nearest_distance", "neighbour_accuracy", "on_one_scale", "subset", "tsne"]

Arrays = dict[str, NDArray[Any]]
Points = NDArray[np.float32]
Floats = NDArray[np.float64]
Counts = dict[str, dict[int, NDArray[np.int64]]]  # images of each class: for `truth` or a method, then by seed
Styles = Mapping[str, Points]  # of each source domain, then of a target's `confident` and `unconfident` images
_DIMENSIONS, _PERPLEXITY = 50, 30.0
_NEIGHBOURS = 5
_METHODS = ("source", "pl", "dpl")  # of figure 2
_MOST_POINTS = 1000
_CONFIDENCE = 0.9
_MOST_SOURCE, _MOST_TARGET = 200, 600  # images of figure 3


class Features(NamedTuple):
    """The features of one method: places on paper, true classes, and how often neighbours share the class."""

    places: Floats
    labels: NDArray[np.int64]
    neighbours: float


class Target(NamedTuple):
    """One row of figure 2: features by method, and counts."""

    features: dict[str, Features]
    counts: Counts


def _inside(unit: Unit, kind: str, experiment: Experiment) -> Arrays:
    """Return the features or styles stored for a unit; absent ones are made, unless nothing may be run."""
    path: Path = experiment.store.root / "figures" / f"{unit.key}.{kind}.npz"
    if path.is_file():
        try:
            with np.load(path, allow_pickle=False) as archive:
                return dict(archive)
        except (OSError, ValueError) as error:
            raise DataError(f"{path}: cannot be read ({error}); remove it to have it made again") from error
    if not experiment.request.run:
        raise DataError(
            f"--no-run: the {kind} of {unit.title} are not in {path.parent}; leave --no-run out to make them"
        )
    arrays = _collect(unit, experiment.context, kind)
    with replacing(path) as draft, draft.open("wb") as file:
        np.savez_compressed(file, **arrays)  # type: ignore[arg-type]
    return arrays


@torch.no_grad()
def _collect(unit: Unit, context: BenchContext, kind: str) -> Arrays:
    """Return features of the network adapted to the unit's stream, or the source's styles (Eq. 8, 9) and confidence."""
    stream = UnitStream(unit, context)
    network, prefix = context.prepared(stream).method.network, 0
    if kind == "features":
        run_unit(unit, context)  # adapts this very model, which the context keeps, from its source state to the end
    else:
        network.style_layer, prefix = find_style_layer(network.module), prefix_tokens(network.module)
    found: list[dict[str, Tensor]] = []
    for batch in (batch for segment in stream.segments for batch in stream.batches(segment) if len(batch)):
        out = network(batch.images.contiguous(memory_format=torch.channels_last))
        if kind == "features":
            found.append({"features": out.z.half(), "label": batch.labels})
        else:
            maps: Any = out.maps
            styles = style_statistics(maps[:, prefix:] if maps.ndim == 3 else maps)
            style = torch.cat([part.flatten(1) for part in styles], dim=1).float()
            found.append({"style": style, "confidence": out.probabilities.max(dim=1).values})
    return {name: torch.cat([part[name] for part in found]).numpy() for name in found[0]}


def subset(size: int, most: int) -> NDArray[np.int64]:
    """Return at most `most` positions, drawn by the size alone: the same ones for every method."""
    return np.sort(np.random.default_rng([0, size]).permutation(size)[:most]).astype(np.int64)


def tsne(points: Points) -> Floats:
    """Return two coordinates for each point, from its first principal components."""
    values = np.asarray(points, dtype=np.float64)
    if min(values.shape) > _DIMENSIONS:
        values = optional("sklearn.decomposition", "bench").PCA(_DIMENSIONS, random_state=0).fit_transform(values)
    manifold, perplexity = optional("sklearn.manifold", "bench"), min(_PERPLEXITY, (len(values) - 1) / 3)
    placed = manifold.TSNE(2, perplexity=perplexity, init="pca", random_state=0).fit_transform(values)
    return np.asarray(placed, dtype=np.float64)


def neighbour_accuracy(points: Points, labels: NDArray[np.int64]) -> float:
    """Return in percent how often a point's nearest others, by cosine, vote for its true class."""
    neighbours = optional("sklearn.neighbors", "bench")
    search = neighbours.NearestNeighbors(n_neighbors=min(_NEIGHBOURS, len(labels) - 1), metric="cosine").fit(points)
    nearest = labels[search.kneighbors(return_distance=False)]  # of the points themselves: each without itself
    return float(100.0 * (optional("scipy.stats", "bench").mode(nearest, axis=1).mode == labels).mean())


def nearest_distance(points: Points, others: Points) -> Floats:
    """Return for each point the mean distance to its nearest few of the others."""
    far = optional("scipy.spatial.distance", "bench").cdist(points, others)
    return np.asarray(np.sort(far, axis=1)[:, :_NEIGHBOURS].mean(axis=1), dtype=np.float64)


def _scatter(axis: Any, groups: Mapping[str, Floats], looks: Sequence[Mapping[str, Any]]) -> None:
    """Draw groups of points, each under its name and with its look, in a panel without a scale."""
    for (name, points), look in zip(groups.items(), looks, strict=True):
        axis.scatter(*points.T, label=name, rasterized=True, **look)
    axis.set(xticks=[], yticks=[])
    axis.grid(False)
    axis.spines[:].set(visible=True, color="#bbbbbb")
    if not groups:
        not_run(axis)


def make_figure2(request: Request) -> Result:
    """Run or resume the experiment, collect features of the adapted networks, and draw."""
    experiment = run_experiment("fig2", request, _METHODS, file="fig1")
    targets = _targets(experiment)
    rows = [
        (f"{name}, {method}", f"{features[method].neighbours:.1f}", f"{misplaced(counts, method):.1f}")
        for name, (features, counts) in targets.items()
        for method in _METHODS
        if method in features
    ]
    note = footer(experiment, "(a) the first, (b) their mean and, as whiskers, their range")
    summary = "; ".join(f"{name}: neighbours {near} %, excess {excess} %" for name, near, excess in rows)
    picture = Picture(
        draw_features(targets, experiment.rows[0]["classes"], note),
        f"t-SNE of features and counts of predicted classes. {summary}.",
        ("", "features: true class among 5 neighbours %", "predicted counts: images in excess %"),
        rows,
        {"counts": {name: target.counts for name, target in targets.items()}},
    )
    return write_figure("fig2", picture, experiment)


def _targets(experiment: Experiment) -> dict[str, Target]:
    """Return the features of each method with its first seed, and how many images each class has with every seed."""
    targets: dict[str, Target] = {}
    for cell, unit in experiment.finished():
        target = targets.setdefault(unit.domains[0], Target({}, {}))
        predictions, classes = experiment.store.predictions(unit), len(experiment.rows[0]["classes"])
        for line, column in (("truth", "label"), (cell.label, "prediction")):
            count = np.bincount(predictions[column].astype(np.int64), minlength=classes)
            target.counts.setdefault(line, {})[cell.seed] = count
        if cell.label not in target.features:
            arrays = _inside(unit, "features", experiment)
            chosen = subset(len(arrays["label"]), _MOST_POINTS)
            points, labels = arrays["features"][chosen].astype(np.float32), arrays["label"][chosen].astype(np.int64)
            target.features[cell.label] = Features(tsne(points), labels, neighbour_accuracy(points, labels))
    return targets


def misplaced(counts: Counts, method: str) -> float:
    """Return in percent how many images would have to change class for the method's counts to be the true ones."""
    truth = counts["truth"]
    shares = [np.abs(own - truth[seed]).sum() / (2 * truth[seed].sum()) for seed, own in counts[method].items()]
    return float(100.0 * np.mean(shares))


def draw_features(targets: Mapping[str, Target], classes: Sequence[str], note: str = "") -> Any:
    """Draw one row for each target: the features of three methods, then a histogram of classes."""
    figure, grid = axes(len(targets), 4, width=12.6, height=0.9 + 2.9 * len(targets))
    for row, (name, target) in zip(grid, targets.items(), strict=True):
        for axis, method in zip(row, _METHODS, strict=False):
            _scatter_classes(axis, target.features.get(method), classes)
            axis.set_title(LOSS_NAMES[method])
        row[0].set_ylabel(NAMES.get(name, name), fontsize=12)
        _histogram(row[3], target.counts, classes)
    grid[0][0].annotate("(a)", (0, 1.1), xycoords="axes fraction", fontweight="bold")
    grid[0][3].annotate("(b)", (-0.12, 1.1), xycoords="axes fraction", fontweight="bold")
    drawn = [handles for axis in grid[:, :3].flat if (handles := axis.get_legend_handles_labels())[1]]
    if drawn:
        figure.legend(*drawn[0], loc="outside lower center", ncols=7, frameon=False, markerscale=2)
    figure.suptitle(note, **NOTE)
    return figure


def _scatter_classes(axis: Any, features: Features | None, classes: Sequence[str]) -> None:
    styles = [{"s": 9, "alpha": 0.75, "linewidths": 0, "color": own[0], "marker": own[1]} for own in LOOK["classes"]]
    groups = {}
    if features is not None:
        groups = {name: features.places[features.labels == number] for number, name in enumerate(classes)}
        axis.set_xlabel(f"true class among neighbours: {features.neighbours:.0f} %", fontsize=8.5)
    _scatter(axis, groups, [styles[number % len(styles)] for number in range(len(groups))])


def _histogram(axis: Any, counts: Counts, classes: Sequence[str]) -> None:
    """Draw the bars of each method beside the true ones; the range of several seeds as a whisker."""
    members = [name for name in ("truth", *_METHODS[1:]) if name in counts]
    seeds = [np.stack([*counts[name].values()]) for name in members]
    means = pd.DataFrame({LOSS_NAMES[name]: own.mean(0) for name, own in zip(members, seeds, strict=True)})
    whiskers = [[own.mean(0) - own.min(0), own.max(0) - own.mean(0)] for own in seeds]
    means.plot.bar(
        ax=axis, width=0.8, yerr=np.array(whiskers), legend=False, color=["#444444", *map(colour, members[1:])],
        error_kw={"elinewidth": 0.8, "ecolor": "#000000"},
    )  # fmt: skip
    axis.set_xticks(range(len(classes)), classes, rotation=40, ha="right", fontsize=9)
    axis.set_ylabel("number of samples")
    place = {"loc": "lower center", "bbox_to_anchor": (0.5, 1.0)}
    axis.legend(**place, ncols=3, frameon=False, fontsize=9, handlelength=1.2, columnspacing=1.0)


def make_figure3(request: Request) -> Result:
    """Run the source model over target and source images and draw their styles."""
    experiment = run_experiment("fig3", request, ("source",), file="fig1")
    units = {unit.domains[0]: unit for _, unit in reversed(experiment.finished())}  # the first seed of each target
    found = {name: _styles(units[name], experiment) for name in reversed(units)}
    shown = f"at most {_MOST_TARGET} target images and {_MOST_SOURCE} held out of each source domain are shown"
    note = f"{measured_on(experiment.rows)}; {shown}"
    rows, data = [], {target: distances(styles) for target, styles in found.items()}
    for target, far in data.items():
        medians = [f"{np.median(d):.2f} ({len(d)})" if len(d) else "– (0)" for d in far.values()]
        share = farther(far)
        rows.append((target, *medians, "–" if share is None else f"{share:.0f} %"))
    summary = "; ".join(f"{row[0]}: unconfident farther in {row[3]} of pairs" for row in rows)
    headers = ("target", "confident: distance to source styles (images)", "unconfident", "unconfident one is farther")
    alt = f"t-SNE of style statistics. {summary}"
    return write_figure("fig3", Picture(draw_styles(found, note), alt, headers, rows, data), experiment)


def _styles(unit: Unit, experiment: Experiment) -> Styles:
    """Return the styles around one target."""
    held_out = {name: replace(unit, domains=(name,), part="outside", limit=_MOST_SOURCE) for name in unit.trained_on}
    sources = {name: _inside(own, "styles", experiment)["style"] for name, own in held_out.items()}
    target = _inside(unit, "styles", experiment)
    chosen = subset(len(target["style"]), _MOST_TARGET)
    styles, confident = target["style"][chosen], target["confidence"][chosen] > _CONFIDENCE
    return on_one_scale({**sources, "confident": styles[confident], "unconfident": styles[~confident]})


def on_one_scale(groups: Styles) -> Styles:
    """Return the styles by group, each dimension with mean 0 and deviation 1 over all of them."""
    preprocessing: Any = optional("sklearn.preprocessing", "bench")
    scaler = preprocessing.StandardScaler().fit(np.concatenate(list(groups.values())))
    return {name: scaler.transform(styles) if len(styles) else styles for name, styles in groups.items()}


def distances(styles: Styles) -> dict[str, Floats]:
    """Return how far confident and unconfident target images are from their nearest source styles."""
    sources = np.concatenate([own for name, own in styles.items() if name not in LOOK["targets"]])
    return {name: nearest_distance(styles[name], sources) for name in LOOK["targets"]}


def farther(far: Mapping[str, Floats]) -> float | None:
    """Return in percent how often an unconfident image is farther from the source than a confident one."""
    if not all(map(len, far.values())):
        return None
    return float(100.0 * (far["unconfident"][:, None] > far["confident"]).mean())


def draw_styles(found: Mapping[str, Styles], note: str = "") -> Any:
    """Draw the styles around each target, of a source domain in the same colour everywhere."""
    figure, grid = axes(1, len(found), width=9.6, height=4.2)
    names = sorted({name for styles in found.values() for name in styles} - {*LOOK["targets"]})
    looks = {}
    for name, shade in zip(names, LOOK["source_domains"] * len(names), strict=False):
        looks[name] = {"s": 10, "alpha": 0.6, "linewidths": 0, "color": shade}
    for name, (shade, marker) in LOOK["targets"].items():
        looks[name] = {"s": 14, "alpha": 0.9, "linewidths": 0.9 * (marker == "x"), "color": shade, "marker": marker}
    for axis, (target, styles) in zip(grid.flat, found.items(), strict=True):
        ends = np.cumsum([len(group) for group in styles.values()])
        places = np.split(tsne(np.concatenate(list(styles.values()))), ends[:-1])
        words = {name: f"{name} target" if name in LOOK["targets"] else NAMES.get(name, name) for name in styles}
        labels = [f"{words[name]} ({len(points)})" for name, points in zip(styles, places, strict=True)]
        _scatter(axis, dict(zip(labels, places, strict=True)), [looks[name] for name in styles])
        axis.legend(loc="upper left", bbox_to_anchor=(0, -0.02), ncols=2, frameon=False, fontsize=8.5, markerscale=1.6)
        axis.set_title(f"target: {NAMES.get(target, target)}")
    figure.supxlabel(note, **NOTE)
    return figure
