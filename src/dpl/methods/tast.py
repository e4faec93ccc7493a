"""TAST: label a sample by its neighbours among the supports, in the spaces of small heads trained on the stream.

Jang, Chung and Chung, Test-Time Adaptation via Self-Training with Nearest Neighbor Information, ICLR 2023.

    S   = the supports of T3A; N(x) = the k supports nearest to z(x) by cosine
    h_e = g_e * (W (a_e * z)) + b_e, e = 1..E: a batch-ensemble head from d to d/4, drawn at random
    m_ec = h_e of class c's mean support,     p_e(c | v) = softmax_c(tau cos(h_e(v), m_ec))
    target_e(x) = mean over N(x) of the one-hot arg-max of p_e,     L = sum_e KL(target_e(x) || p_e(x)) / (B C)
    answer(x) = mean over e and N(x) of p_e

Updates: the head (Adam) and the support set; the network is frozen, with the source's BatchNorm statistics. Needs: a
linear classifier. Output: log answer, so that softmax gives back the probabilities that the authors return; the batch
enters the supports first, the answer is from before the last update of the head. `predict` answers with the supports
and the head as they are. The authors choose E in 1, 5, 10, 20, K as in T3A, steps in 1, 3 and k in 1, 2, 4, 8 on source
validation data; the defaults are from the middle of these.

The head is affine, so the mean of a class's projected supports is the projection of their mean: C rows are projected
instead of all supports, and of these only the neighbours. Departures: `reset` brings back the same random head (theirs
draws a new one); fewer supports than k are no error; filter_k=-1 is bounded by `capacity`.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from dpl.core.optimizer import NamedOptimizer, OptimizerFactory
from dpl.core.settings import setting
from dpl.methods.base import Method
from dpl.methods.parts.supports import SupportSet, SupportSettings
from dpl.methods.parts.votes import EnsembleHead, mean_divergence, project, scaled_cosine, vote
from dpl.methods.registry import register
from dpl.network import Network

__all__ = ["TAST", "TASTSettings"]


@dataclass(frozen=True, kw_only=True)
class TASTSettings(SupportSettings):
    """Settings of TAST."""

    lr: float = setting(1e-3, "learning rate of the head", low=0)
    optimizer: str | OptimizerFactory = setting("adam", "optimizer of the head, as for gradient methods")
    steps: int = setting(1, "updates for each batch", low=1)
    ensemble_size: int = setting(5, "E: members of the ensemble", low=1, formerly="members")
    neighbours: int = setting(4, "k: supports that vote for a sample; at most filter_k", low=1)
    scale: float = setting(10.0, "tau: factor of the cosine similarities", low=0)


@register(
    "tast",
    paper="Jang et al., Test-Time Adaptation via Self-Training with Nearest Neighbor Information, ICLR 2023",
    updates="a small ensemble head and a support set of features; no weights of the network",
    passes="1 forward; forward and backward of the head only",
    needs_classifier=True,
)
class TAST(Method[TASTSettings]):
    """Nearest neighbours vote in the spaces of an ensemble head."""

    settings_class = TASTSettings
    no_export = "stored features of the stream vote for each prediction"
    supports: SupportSet
    head: EnsembleHead

    def __init__(self, network: Network, settings: TASTSettings) -> None:
        super().__init__(network, settings)
        self.declare_part("supports", SupportSet(network, settings))
        features = self.supports.features
        self.declare_module(
            "head", EnsembleHead(features.shape[2], settings.ensemble_size, self.random, features.dtype)
        )
        parameters = {f"head.{name}": parameter for name, parameter in self.head.named_parameters()}
        self.optimizer = NamedOptimizer(parameters, settings.optimizer, settings.lr)

    @property
    def optimizers(self) -> dict[str, NamedOptimizer]:
        """The head's optimizer."""
        return {"optimizer": self.optimizer}

    def step(self, images: Tensor) -> Tensor:
        """Add the batch to the supports, let the neighbours vote, teach the head their vote."""
        with torch.no_grad():
            out = self.network(images)
        self.supports.add(out)
        neighbours, found = self._neighbours(out.z)
        for _ in range(self.settings.steps):
            with torch.enable_grad():
                centroids = self._centroids()
                targets, answer = self._vote(neighbours, found, centroids.detach())
                logits = scaled_cosine(project(out.z, self.head), centroids, self.settings.scale)
                loss = self.settings.ensemble_size * mean_divergence(logits, targets)
                updated = self.optimizer.step(loss, loss.detach().isfinite())
        self.facts = {"loss": loss.detach(), "updated": updated, "supports": self.supports.size}
        return answer.log().to(out.logits.dtype)

    @torch.no_grad()
    def predict(self, images: Tensor) -> Tensor:
        """Answer with the supports and the head as they are."""
        out = self.network(images)
        _, answer = self._vote(*self._neighbours(out.z), self._centroids())
        return answer.log().to(out.logits.dtype)

    def _neighbours(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """Return the supports that vote, [B, k, d]; with filter_k=-1 no more than a class has on average."""
        k = min(self.settings.neighbours, self.supports.places)
        neighbours, found = self.supports.nearest(features, k)
        if self.settings.filter_k == -1:
            average = (self.supports.size // self.network.classes).clamp(min=1)
            found = found & (torch.arange(found.shape[1], device=found.device) < average)
        return neighbours, found

    def _centroids(self) -> Tensor:
        """Return the direction of each class's centroid for each member, [E, C, d/4]; zero for an empty class."""
        means, present = self.supports.means()
        return project(means, self.head) * present[:, None]

    @torch.no_grad()
    def _vote(self, neighbours: Tensor, found: Tensor, centroids: Tensor) -> tuple[Tensor, Tensor]:
        logits = scaled_cosine(project(neighbours.flatten(0, 1), self.head), centroids, self.settings.scale)
        targets, answers = vote(logits.view(len(logits), *found.shape, -1), found)  # [E, B, k, C] -> [E, B, C]
        return targets, answers.mean(dim=0)
