"""A support set answers, with logits that spread as the classifier's do."""

import torch
from torch import Tensor

from dpl.core.numerics import at_least_float32
from dpl.core.state import Stateful
from dpl.methods.parts.supports import SupportSet
from dpl.network import Network, Pass

__all__ = ["AnsweredBySupports"]

_EPS = 1e-12


class AnsweredBySupports(Stateful):
    """What a method adds whose support set predicts; it stands before the method's base class."""

    network: Network
    scale: Tensor  # [], of the memory's logits

    def declare_answer(self, network: Network, supports: SupportSet, *, by_memory: bool) -> None:
        """Answer by these supports, or by the network's classifier."""
        self._supports, self._by_memory = supports, by_memory
        self.declare(scale=torch.ones((), device=network.device))

    @torch.no_grad()
    def enter(self, out: Pass) -> Tensor:
        """Let the batch enter the support set, and predict it; the memory's logits get the spread of the classifier's.

        Their order stays. A confidence then means what it meant to whoever compares it with the source model's.
        """
        self._supports.add(out)
        memory, classifier = self._supports.scores(out.z), at_least_float32(out.reference)
        self.scale = (_spread(classifier) / _spread(memory).clamp(min=_EPS)).to(self.scale.dtype)
        return self.scores(out)

    @torch.no_grad()
    def predict(self, images: Tensor) -> Tensor:
        """Predict with the supports as they are."""
        return self.scores(self.network(images))

    def exported_classifier(self) -> tuple[Tensor, Tensor | None] | None:
        """Return the memory's directions, a linear layer without a bias, if they answer."""
        if not self._by_memory:
            return None
        return self.scale * self._supports.directions(), None

    @torch.no_grad()
    def scores(self, out: Pass) -> Tensor:
        """Return the logits of the memory, or of the classifier if that is to answer."""
        if not self._by_memory:
            return out.reference
        return (self.scale * self._supports.scores(out.z)).to(out.reference.dtype)


def _spread(logits: Tensor) -> Tensor:
    """Return the length of all logits together, each row centred."""
    return (logits - logits.mean(dim=1, keepdim=True)).square().sum().sqrt()
