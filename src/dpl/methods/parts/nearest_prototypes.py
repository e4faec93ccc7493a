"""A classifier by nearest source prototypes: a projection of the features, trained once on labelled source features."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpl.core.random import Random
from dpl.core.state import Stateful
from dpl.memory import update_class_memory
from dpl.network import Network

__all__ = ["NearestPrototypes"]

_BATCH = 64  # source features for each step of the projection's training
_LR = 1e-3


class NearestPrototypes(Stateful):
    """softmax(cos(g(z), q_k) / tau) over classes k, with a projection g and source prototypes q."""

    head: nn.Module
    prototypes: Tensor  # [C, e]

    def __init__(self, network: Network, width: int, temperature: float, random: Random) -> None:
        super().__init__()
        self.temperature, self.random = temperature, random
        inner = network.classifier.in_features
        with torch.random.fork_rng(devices=[]):  # layers draw their weights from the global generator
            torch.default_generator.manual_seed(random.fresh_seed())
            head = nn.Sequential(nn.Linear(inner, inner), nn.ReLU(), nn.Linear(inner, width))
        self.declare_module("head", head.to(network.device, network.dtype).requires_grad_(False))
        self.declare(prototypes=torch.zeros(network.classes, width, device=network.device, dtype=network.dtype))

    def logits(self, features: Tensor) -> Tensor:
        """Return cos(g(z), q_k) / tau, [B, C]."""
        return self._similarities(self.head(features))

    def fit(self, features: Tensor, views: Tensor, labels: Tensor, *, momentum: float, epochs: int) -> None:
        """Train the projection on source features and on those of transformed images, the prototypes following it."""
        self.head.requires_grad_(True)
        optimizer = torch.optim.Adam(self.head.parameters(), lr=_LR)
        self.prototypes = self._class_means(features, labels)
        for _ in range(epochs):
            order = self.random.permutation(len(labels))
            for rows in torch.split(order, _BATCH):
                self._fit_batch(optimizer, features[rows], views[rows], labels[rows], momentum)
        self.head.requires_grad_(False)

    @torch.enable_grad()
    def _fit_batch(
        self, optimizer: torch.optim.Optimizer, features: Tensor, views: Tensor, labels: Tensor, momentum: float
    ) -> None:
        embedded = self.head(features)
        self.prototypes = update_class_memory(self.prototypes, embedded.detach(), labels, momentum)
        loss = F.cross_entropy(self._similarities(embedded), labels) + F.cross_entropy(self.logits(views), labels)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    @torch.no_grad()
    def _class_means(self, features: Tensor, labels: Tensor) -> Tensor:
        total = torch.zeros_like(self.prototypes).index_add(0, labels, self.head(features))
        return total / labels.bincount(minlength=len(total)).clamp(min=1)[:, None]

    def _similarities(self, embedded: Tensor) -> Tensor:
        return F.normalize(embedded, dim=1) @ F.normalize(self.prototypes, dim=1).T / self.temperature
