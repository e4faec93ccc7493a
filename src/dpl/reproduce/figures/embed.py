"""Many dimensions on paper: t-SNE, and how well classes are told apart before it bends the distances."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpl.core.extras import optional

__all__ = ["frame", "nearest_distance", "neighbour_accuracy", "standardised", "subset", "tsne"]

Points = NDArray[np.float32]
_DIMENSIONS, _PERPLEXITY = 50, 30.0
_NEIGHBOURS = 5


def frame(axis: Any, *, there: bool) -> None:
    """Make a panel for points that have no scale, and say so if there are none."""
    axis.set(xticks=[], yticks=[])
    axis.grid(False)
    axis.spines[:].set_visible(True)
    axis.spines[:].set_color("#bbbbbb")
    if not there:
        axis.text(0.5, 0.5, "not run", transform=axis.transAxes, ha="center", color="#555555")


def subset(size: int, most: int) -> NDArray[np.int64]:
    """Return at most so many positions, drawn by the size alone: the same ones for every method."""
    if size <= most:
        return np.arange(size, dtype=np.int64)
    return np.sort(np.random.default_rng([0, size]).permutation(size)[:most]).astype(np.int64)


def tsne(points: Points, seed: int = 0) -> NDArray[np.float64]:
    """Return two coordinates for each point; the first principal components are what is embedded."""
    decomposition: Any = optional("sklearn.decomposition", "bench")
    manifold: Any = optional("sklearn.manifold", "bench")
    values = np.asarray(points, dtype=np.float64)
    if min(values.shape) > _DIMENSIONS:
        values = decomposition.PCA(_DIMENSIONS, random_state=seed).fit_transform(values)
    perplexity = min(_PERPLEXITY, (len(values) - 1) / 3)
    placed = manifold.TSNE(2, perplexity=perplexity, init="pca", random_state=seed).fit_transform(values)
    return np.asarray(placed, dtype=np.float64)


def standardised(points: Points) -> Points:
    """Return each dimension with mean 0 and deviation 1; one that never varies stays 0."""
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
