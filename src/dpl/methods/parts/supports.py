"""The support set that T3A, TAST and TSD carry: starts as the classifier's rows, keeps the surest samples."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from dpl.core.errors import SettingError
from dpl.core.numerics import at_least_float32, full_precision
from dpl.core.settings import setting
from dpl.core.state import Stateful
from dpl.memory.supports import (
    EMPTY,
    drop_worst_supports,
    insert_supports,
    nearest_supports,
    support_means,
    support_sums,
    widen_supports,
)
from dpl.methods.settings import Settings
from dpl.network import Network, Pass
from dpl.objectives import entropy

__all__ = ["SupportSet", "SupportSettings"]

_ROWS_AT_ONCE = 1024


@dataclass(frozen=True, kw_only=True)
class SupportSettings(Settings):
    """Settings of every method with a support set of features."""

    filter_k: int = setting(
        20, "K: supports of lowest entropy kept for each class; -1: all, as far as `capacity` allows", low=-1
    )
    capacity: int = setting(
        50_000, "most supports in all when filter_k is -1, shared evenly by the classes: state stays bounded", low=1
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.filter_k == 0:
            raise SettingError("filter_k=0: expected a whole number of at least 1, or -1 to keep all supports")


class SupportSet(Stateful):
    """Features by pseudo-label, the `filter_k` of lowest entropy for each class; what leaves is gone for good."""

    features: Tensor  # [C, K, d]
    entropies: Tensor  # [C, K], EMPTY for an empty place
    sums: Tensor  # [C, d], of each class's normalised supports

    def __init__(self, network: Network, settings: SupportSettings) -> None:
        super().__init__()
        self.network = network
        keep_all = settings.filter_k == -1
        self.places = max(1, settings.capacity // network.classes) if keep_all else settings.filter_k
        self.declare(features=torch.empty(0), entropies=torch.empty(0), sums=torch.empty(0))
        self.restart()

    def restart(self) -> None:
        """Start from the classifier's rows."""
        rows = at_least_float32(self.network.prototypes.detach())
        labels, entropies = _read_rows(self.network)
        # Only what is needed at first: a row's own class need not be the one that the classifier gives it.
        most = int(torch.bincount(labels).max())
        self.features = rows.new_zeros(len(rows), min(self.places, most), rows.shape[1])
        self.entropies = torch.full_like(self.features[:, :, 0], EMPTY)
        self.sums = torch.zeros_like(self.features[:, 0])
        self._replaced: list[tuple[Tensor, ...]] | None = None
        self._insert(rows, labels, entropies)

    def keep(self) -> Callable[[], None]:
        """Return a function that undoes insertions; only the classes that a batch touches are copied, not the set."""
        self._replaced = []
        return self._undo_insertions

    @torch.no_grad()
    def _undo_insertions(self) -> None:
        for features, entropies, labels, old_features, old_entropies in reversed(self._replaced or []):
            features.index_copy_(0, labels, old_features)
            entropies.index_copy_(0, labels, old_entropies)
        self._replaced = None

    def add(self, out: Pass) -> Tensor:
        """Let the samples of a pass enter under their arg-max; return which did."""
        width = self.entropies.shape[1]
        if width < self.places:  # grow with the stream; doubling keeps the copying in proportion to it
            width = min(self.places, max(width + len(out.logits), 2 * width))
            self.features, self.entropies = widen_supports(self.features, self.entropies, width)
        logits = out.logits.detach()
        return self._insert(out.z.detach(), logits.argmax(dim=1), entropy(logits))

    @torch.no_grad()
    def _insert(self, features: Tensor, labels: Tensor, entropies: Tensor) -> Tensor:
        if self._replaced is not None:
            before = self.features[labels], self.entropies[labels]
            self._replaced.append((self.features, self.entropies, labels, *before))
        entered = insert_supports(self.features, self.entropies, features, labels, entropies)
        self._sum(labels)
        return entered

    def _sum(self, labels: Tensor) -> None:
        """Add up the supports again where something may have changed: in the given classes, if that is less work."""
        if len(labels) >= len(self.sums):
            self.sums = support_sums(self.features, self.entropies)
        else:
            fresh = support_sums(self.features[labels], self.entropies[labels])
            self.sums = self.sums.index_copy(0, labels, fresh.to(self.sums.dtype))

    @torch.no_grad()
    def drop_worst(self) -> None:
        """Remove the support of highest entropy from every class."""
        self.entropies = drop_worst_supports(self.entropies)
        self.sums = support_sums(self.features, self.entropies)

    @property
    def size(self) -> Tensor:
        """How many supports there are, as a 0-d tensor."""
        return (self.entropies < EMPTY).sum()

    @torch.no_grad()
    def scores(self, features: Tensor) -> Tensor:
        """Return T3A's logits: the inner products of features [B, d] with each class's mean direction."""
        return _inner_products(features, self.directions())

    def directions(self) -> Tensor:
        """Return each class's mean direction [C, d], the weight of a linear classifier without a bias."""
        return F.normalize(at_least_float32(self.sums), dim=1)

    @torch.no_grad()
    def means(self) -> tuple[Tensor, Tensor]:
        """Return the mean of each class's supports, [C, d], and which classes have any, [C]."""
        present = (self.entropies < EMPTY).any(dim=1)
        return support_means(self.features, self.entropies), present

    @torch.no_grad()
    def nearest(self, queries: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Return the k most similar supports of each query, [B, k, d], and which of them exist, [B, k]."""
        rows = self.features.flatten(0, 1)
        index, found = nearest_supports(queries, rows, k, (self.entropies < EMPTY).flatten())
        return at_least_float32(rows[index]), found


@full_precision
def _inner_products(features: Tensor, templates: Tensor) -> Tensor:
    return features @ templates.to(features.dtype).T


@torch.no_grad()
def _read_rows(network: Network) -> tuple[Tensor, Tensor]:
    """Return the classes and entropies that the classifier gives its own rows, a part at a time: C² may be much."""
    logits = (network.classifier(part) for part in network.prototypes.split(_ROWS_AT_ONCE))  # type: ignore[no-untyped-call]
    answers = [(part.argmax(dim=1), entropy(part)) for part in logits]
    return torch.cat([labels for labels, _ in answers]), torch.cat([entropies for _, entropies in answers])
