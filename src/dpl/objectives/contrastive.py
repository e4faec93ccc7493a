"""Contrastive losses: views of one sample against each other, and a query against its key and a queue."""

import torch
import torch.nn.functional as F
from torch import Tensor

from dpl.core.errors import InputError, SettingError
from dpl.core.numerics import cosines, full_precision

__all__ = ["class_aware_info_nce", "view_contrast"]


def view_contrast(views: Tensor, temperature: float) -> Tensor:
    """Pull the views of each sample together and push all other samples' views away (Khosla et al., 2020).

    Args:
        views: V >= 2 views of B samples, [V, B, d]; only their directions matter.
        temperature: tau of the cosine similarities.

    Returns:
        -log of each anchor's softmax over the VB - 1 other vectors, averaged over its V - 1 positives, then over all
        VB anchors.
    """
    if views.ndim != 3 or len(views) < 2:
        raise InputError(f"views have shape {tuple(views.shape)}; expected [V, B, d] with at least two views")
    count, samples = views.shape[:2]
    vectors = views.flatten(0, 1)
    similarity = cosines(vectors, vectors, temperature)  # [VB, VB]
    itself = torch.eye(len(vectors), dtype=torch.bool, device=views.device)
    others = similarity.masked_fill(itself, -torch.inf).logsumexp(dim=1)  # [VB]
    pairs = similarity.view(count, samples, count, samples).diagonal(dim1=1, dim2=3)  # [V, V, B], same sample
    positives = pairs.sum(dim=1) - pairs.diagonal().T  # [V, B], without the anchor itself
    return (others.view(count, samples) - positives / (count - 1)).mean()


@full_precision
def class_aware_info_nce(
    queries: Tensor, keys: Tensor, labels: Tensor, queue: Tensor, queue_labels: Tensor, temperature: float
) -> Tensor:
    """InfoNCE of each query's key against the queue, without entries of the query's own class (Chen et al., 2022).

    Args:
        queries: [B, d], with gradient; normalised here.
        keys: the same samples seen by the other encoder, [B, d]; normalised here.
        labels: pseudo-labels of the samples, [B].
        queue: unit vectors of earlier samples, [K, d].
        queue_labels: their pseudo-labels, [K].
        temperature: tau of the cosine similarities.

    Returns:
        The mean cross-entropy of picking the key; zero if the queue contains only the query's class.
    """
    if not temperature > 0:
        raise SettingError(f"temperature={temperature!r}: expected a number above 0")
    if queries.shape != keys.shape or queue.shape[1:] != queries.shape[1:]:
        raise InputError(
            f"queries have shape {tuple(queries.shape)}, keys {tuple(keys.shape)} and the queue {tuple(queue.shape)}; "
            "expected [B, d], [B, d] and [K, d]"
        )
    query, key = F.normalize(queries, dim=1), F.normalize(keys, dim=1)
    positive = (query * key).sum(dim=1, keepdim=True)  # [B, 1]
    negatives = (query @ queue.T).masked_fill(labels[:, None] == queue_labels, -torch.inf)
    similarity = torch.cat([positive, negatives], dim=1) / temperature  # [B, 1 + K]
    return F.cross_entropy(similarity, torch.zeros_like(labels))
