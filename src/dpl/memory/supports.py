"""Support sets: for each class, the samples that were predicted with the lowest entropy.

A set has K places for each class: `features` [C, K, d] and their `entropies` [C, K], where EMPTY marks an empty place.
The class of a support is its row, so no label is stored. Inserting a batch of B copies O(B d) values, and no shape
depends on the data, so that a GPU is never synchronised.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from dpl.core.errors import InputError, SettingError
from dpl.core.numerics import at_least_float32, full_precision

__all__ = [
    "EMPTY",
    "drop_worst_supports",
    "insert_supports",
    "lowest_in_class",
    "nearest_supports",
    "rank_in_class",
    "support_means",
    "support_sums",
    "widen_supports",
]

_EPS = 1e-12

# Above any entropy (at most log C), finite, and exact in half precision too.
EMPTY = 8192.0


def rank_in_class(labels: Tensor, entropies: Tensor) -> tuple[Tensor, Tensor]:
    """Return each sample's place in the order of its class (0: lowest entropy), and the index of its class's best.

    Of equal entropies the earlier sample comes first; NaN comes last.
    """
    order = _by_class(labels, entropies)
    sorted_labels = labels[order]
    start = torch.searchsorted(sorted_labels, sorted_labels)  # where each sample's class begins
    rank = torch.arange(len(order), device=order.device) - start
    unsorted = torch.empty_like(order)
    return unsorted.scatter(0, order, rank), unsorted.scatter(0, order, order[start])


def lowest_in_class(labels: Tensor, entropies: Tensor, per_class: int, total: int | None = None) -> Tensor:
    """Return the indices of the `per_class` lowest entropies of each class, class by class in rising order.

    With `total`, at most so many are returned: those of the lowest rank in their class, then of the lowest entropy.
    """
    if per_class < 1 or (total is not None and total < 1):
        raise SettingError(f"per_class={per_class!r}, total={total!r}: expected whole numbers of at least 1")
    rank, _ = rank_in_class(labels, entropies)
    order = _by_class(labels, entropies)
    kept = order[rank[order] < per_class]
    if total is None or len(kept) <= total:
        return kept
    best_first = kept[entropies[kept].argsort(stable=True)]
    best_first = best_first[rank[best_first].argsort(stable=True)][:total]
    chosen = torch.zeros_like(labels, dtype=torch.bool).index_fill(0, best_first, True)
    return kept[chosen[kept]]


def widen_supports(features: Tensor, entropies: Tensor, places: int) -> tuple[Tensor, Tensor]:
    """Return the set with empty places added, so that each class has `places`."""
    more = places - entropies.shape[1]
    if more < 0:
        raise InputError(f"places={places}: the set has {entropies.shape[1]} places for each class already")
    return F.pad(features, (0, 0, 0, more)), F.pad(entropies, (0, more), value=EMPTY)


def insert_supports(
    features: Tensor, entropies: Tensor, new_features: Tensor, labels: Tensor, new_entropies: Tensor
) -> Tensor:
    """Replace supports of a higher entropy by new samples of the same class, in place.

    Afterwards each class holds the K lowest entropies of old and new together. The sample of rank r within
    its class is compared with the r-th worst support and replaces it if its entropy is lower.

    Args:
        features: the set's features, [C, K, d]; changed.
        entropies: the set's entropies, [C, K], EMPTY for an empty place; changed.
        new_features: [B, d].
        labels: their classes, [B].
        new_entropies: [B]; a sample whose value is not finite is never inserted.

    Returns:
        Which samples were inserted, [B].
    """
    places = _check_shapes(features, entropies, new_features, labels)
    rank, best = rank_in_class(labels, new_entropies)
    fits = rank < places
    # A sample beyond the K best of its class cannot be inserted. Its row repeats that of the best sample, which keeps
    # the shape fixed: equal values written twice into one place do not conflict.
    row = torch.where(fits, torch.arange(len(labels), device=labels.device), best)
    rank = torch.where(fits, rank, 0)[:, None]
    worst, place = entropies[labels].topk(min(places, len(labels)), dim=1)
    target = labels * places + place.gather(1, rank)[:, 0]
    candidates = new_entropies[row].to(entropies.dtype)
    enters = candidates < worst.gather(1, rank)[:, 0]
    flat, flat_entropies = features.view(-1, features.shape[2]), entropies.view(-1)
    values = torch.where(enters[:, None], new_features[row].to(features.dtype), flat[target])
    flat.index_copy_(0, target, values)
    flat_entropies.index_copy_(0, target, torch.where(enters, candidates, flat_entropies[target]))
    return enters & fits


def drop_worst_supports(entropies: Tensor) -> Tensor:
    """Return the entropies with the highest of each class replaced by EMPTY."""
    worst = entropies.masked_fill(entropies >= EMPTY, -1).argmax(dim=1, keepdim=True)
    return entropies.scatter(1, worst, EMPTY)


@full_precision
def support_sums(features: Tensor, entropies: Tensor) -> Tensor:
    """Return for each class the sum of its L2-normalised supports, [C, d]; zero for an empty class."""
    length = torch.linalg.vector_norm(features, dim=2).clamp(min=_EPS)
    return _weighted_sum(features, (entropies < EMPTY).to(features.dtype) / length)


@full_precision
def support_means(features: Tensor, entropies: Tensor) -> Tensor:
    """Return for each class the mean of its supports, [C, d]; zero for an empty class."""
    held = (entropies < EMPTY).to(features.dtype)
    return _weighted_sum(features, held / held.sum(dim=1, keepdim=True).clamp(min=1))


def nearest_supports(queries: Tensor, supports: Tensor, k: int, held: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return the indices of the k most similar supports (cosine) of each query, best first, and which exist.

    Args:
        queries: [B, d].
        supports: [N, d].
        k: how many; no more than N are returned.
        held: [N], False for an empty place.

    Returns:
        Indices [B, k] and a mask [B, k] that is False where there are fewer than k supports.
    """
    similarity = _similarity_by_query(queries, at_least_float32(supports))
    if held is not None:
        similarity = similarity.masked_fill(~held, -torch.inf)
    value, index = similarity.topk(min(k, len(supports)), dim=1)
    return index, value > -torch.inf


@full_precision
def _similarity_by_query(queries: Tensor, supports: Tensor) -> Tensor:
    """Return cosines times the length of the query, which does not change the order within a row."""
    length = torch.linalg.vector_norm(supports, dim=1).clamp(min=_EPS)
    return (queries @ supports.T).div(length)


def _weighted_sum(features: Tensor, weights: Tensor) -> Tensor:
    return torch.bmm(weights[:, None, :], features)[:, 0]


def _by_class(labels: Tensor, entropies: Tensor) -> Tensor:
    order = entropies.argsort(stable=True)
    return order[labels[order].argsort(stable=True)]


def _check_shapes(features: Tensor, entropies: Tensor, new_features: Tensor, labels: Tensor) -> int:
    if entropies.shape != features.shape[:2] or entropies.shape[1] == 0:
        raise InputError(
            f"features have shape {tuple(features.shape)} and entropies {tuple(entropies.shape)}; "
            "expected [C, K, d] and [C, K] with K of at least 1"
        )
    if new_features.shape != (len(labels), features.shape[2]):
        raise InputError(
            f"new_features have shape {tuple(new_features.shape)}; expected [{len(labels)}, {features.shape[2]}]"
        )
    return entropies.shape[1]
