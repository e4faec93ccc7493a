"""TAST-BN: TAST's neighbour labels, learned through the normalisation layers instead of a head.

Jang, Chung and Chung, Test-Time Adaptation via Self-Training with Nearest Neighbor Information, ICLR 2023.

    S = for each class the K test images of lowest entropy predicted as it; z: features of [batch; S] in one pass
    m_c = mean feature of class c's supports,     p(c | v) = softmax_c(tau cos(z(v), m_c))
    target(x) = mean over the k nearest supports of the one-hot arg-max of p,     L = KL(target(x) || p(x)) / (B C)
    answer(x) = mean over the k nearest supports of p

Updates: affine parameters of normalisation layers (Adam), with the statistics of batch and supports together, and the
support set of images. Needs: a linear classifier, normalisation layers, and memory for the support images. Output: log
answer, so that softmax gives back the probabilities that the authors return; the batch enters the supports first, the
answer is from before the last update. `predict` answers with the supports there are; while there are none, it returns
the network's own logits.

The authors choose K in 1, 5, 20, steps in 1, 3 and k in 1, 2, 4, 8 on source validation data, with K lowered so that
there are at most 150 supports. Departures: with more than 150 classes, where theirs would keep none, each class keeps
one and the surest 150 stay (`capacity`); fewer supports than k are no error.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from dpl.core.numerics import full_precision
from dpl.core.settings import setting
from dpl.memory.supports import lowest_in_class, nearest_supports
from dpl.methods.base import GradientMethod, Objective
from dpl.methods.parts.votes import mean_divergence, scaled_cosine, vote
from dpl.methods.registry import register
from dpl.methods.settings import GradientSettings
from dpl.network import Network, Pass
from dpl.objectives import entropy

__all__ = ["TASTBN", "TASTBNSettings", "mean_logits"]


@dataclass(frozen=True, kw_only=True)
class TASTBNSettings(GradientSettings, norm="batch"):
    """Settings of TAST-BN."""

    filter_k: int = setting(5, "K: images of lowest entropy kept for each class, as far as `capacity` allows", low=1)
    capacity: int = setting(150, "most support images in all; each is in every pass", low=1)
    neighbours: int = setting(4, "k: supports that vote for a sample; at most filter_k", low=1)
    scale: float = setting(10.0, "tau: factor of the cosine similarities", low=0)


@register(
    "tast_bn",
    paper="Jang et al., Test-Time Adaptation via Self-Training with Nearest Neighbor Information, ICLR 2023",
    updates="affine parameters of normalisation layers and a support set of images",
    passes="1 forward; 1 forward and backward of batch and supports",
    needs_classifier=True,
    host_reads=1,
)
class TASTBN(GradientMethod[TASTBNSettings]):
    """Nearest neighbours vote in the network's own feature space."""

    settings_class = TASTBNSettings
    no_export = "stored images of the stream vote for each prediction"
    images: Tensor | None  # [N, ...]
    labels: Tensor | None  # [N]
    entropies: Tensor | None  # [N]

    def __init__(self, network: Network, settings: TASTBNSettings) -> None:
        super().__init__(network, settings)
        self.per_class = max(1, min(settings.filter_k, settings.capacity // network.classes))
        self.declare(images=None, labels=None, entropies=None)

    def step(self, images: Tensor) -> Tensor:
        """Add the batch to the supports, let the neighbours vote, learn their vote."""
        labels = self._add(images)
        for _ in range(self.settings.steps):
            with torch.enable_grad():
                out = self._pass(images)
                batch, features = out.first(len(images)), out.z[len(images) :]
                targets, answer = self._vote(batch.z.detach(), features.detach(), labels)
                logits = mean_logits(batch.z, features, labels, self.network.classes, self.settings.scale)
                loss = mean_divergence(logits, targets)
                self.update(Objective(loss, facts={"supports": len(labels)}), batch)
        return self.answer(images, answer.log().to(out.logits.dtype))

    @torch.no_grad()
    def predict(self, images: Tensor) -> Tensor:
        """Answer with the supports and the network as they are."""
        out = self._pass(images)
        if self.labels is None:
            return out.logits
        _, answer = self._vote(out.z[: len(images)], out.z[len(images) :], self.labels)
        return answer.log().to(out.logits.dtype)

    @torch.no_grad()
    def _add(self, images: Tensor) -> Tensor:
        """Let the batch into the supports and return the supports' labels. Their number depends on the data."""
        logits = self.network(images).logits
        labels, entropies = logits.argmax(dim=1), entropy(logits)
        if self.images is not None and self.labels is not None and self.entropies is not None:
            images = torch.cat([self.images, images])
            labels = torch.cat([self.labels, labels])
            entropies = torch.cat([self.entropies, entropies.to(self.entropies.dtype)])
        kept = lowest_in_class(labels, entropies, self.per_class, self.settings.capacity)
        self.images, self.labels, self.entropies = images[kept], labels[kept], entropies[kept]
        return self.labels

    def _pass(self, images: Tensor) -> Pass:
        return self.network(images if self.images is None else torch.cat([images, self.images]))

    @torch.no_grad()
    def _vote(self, features: Tensor, supports: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        own = mean_logits(supports, supports, labels, self.network.classes, self.settings.scale)  # [N, C]
        k = min(self.settings.neighbours, self.per_class)
        index, found = nearest_supports(features, supports, k)
        return vote(own[index], found)


@full_precision
def mean_logits(features: Tensor, supports: Tensor, labels: Tensor, classes: int, scale: float) -> Tensor:
    """Return tau cos(v, m_c) for the rows v of `features`, [n, C]; 0 for a class without supports."""
    sums = features.new_zeros(classes, features.shape[1]).index_add(0, labels, supports.to(features.dtype))
    # a sum points the same way as a mean
    return scaled_cosine(F.normalize(features, dim=1), F.normalize(sums, dim=1), scale)
