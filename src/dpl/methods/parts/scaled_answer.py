"""A support set answers beside the classifier, with logits that spread as the classifier's do."""

from typing import Literal

import torch
from torch import Tensor

from dpl.core.numerics import at_least_float32
from dpl.core.state import Stateful
from dpl.methods.parts.effective_batch import EffectiveBatch
from dpl.methods.parts.supports import SupportSet
from dpl.network import Network, Pass

__all__ = ["Answer", "AnsweredBySupports"]

Answer = Literal["both", "memory", "classifier"]

_EPS = 1e-12


class AnsweredBySupports(Stateful):
    """What a method adds whose support set predicts; it stands before the method's base class."""

    network: Network
    effective_batch: EffectiveBatch | None
    scale: Tensor  # [], of the memory's logits
    memory_share: Tensor  # [], in the answer

    def declare_answer(self, network: Network, supports: SupportSet, answer: Answer) -> None:
        """Answer by these supports, by the network's classifier, or by both."""
        self._supports, self._answer = supports, answer
        self.declare(scale=torch.ones((), device=network.device), memory_share=self._memory_share(1))

    @torch.no_grad()
    def enter(self, out: Pass) -> Tensor:
        """Let the batch enter the support set, and predict it; the memory's logits get the spread of the classifier's.

        Their order stays. A confidence then means what it meant to whoever compares it with the source model's.
        """
        self._supports.add(out)
        memory, classifier = self._supports.scores(out.z), at_least_float32(out.reference)
        self.scale = (_spread(classifier) / _spread(memory).clamp(min=_EPS)).to(self.scale.dtype)
        self.memory_share = self._memory_share(len(out.reference))
        return self.scores(out)

    def _memory_share(self, count: int) -> Tensor:
        """Return the share of the memory in the answer to a batch of `count` images.

        Of both it is a half, and less where the images of a batch are alike: then the classes that came first have
        supports from the stream, and attract the images of those that are still to come.
        """
        fixed = {"both": 0.5, "memory": 1.0, "classifier": 0.0}[self._answer]
        share = torch.full((), fixed, device=self.network.device)
        if self._answer != "both" or self.effective_batch is None:
            return share
        return share * self.effective_batch.rule.effective_size(count) / count

    @torch.no_grad()
    def predict(self, images: Tensor) -> Tensor:
        """Predict with the supports as they are."""
        return self.scores(self.network(images))

    def exported_classifier(self) -> tuple[Tensor, Tensor | None] | None:
        """Return the linear layer that answers, if it is not the network's own."""
        if self._answer == "classifier":
            return None
        rows, bias = at_least_float32(self.network.prototypes.detach()), self.network.classifier.bias
        weight = rows.lerp(self.scale * self._supports.directions(), self.memory_share)
        return weight, None if bias is None else (1 - self.memory_share) * bias.detach()

    @torch.no_grad()
    def scores(self, out: Pass) -> Tensor:
        """Return the logits of the answer."""
        if self._answer == "classifier":
            return out.reference
        memory = (self.scale * self._supports.scores(out.z)).to(out.reference.dtype)
        return out.reference.lerp(memory, self.memory_share.to(memory.dtype))


def _spread(logits: Tensor) -> Tensor:
    """Return the length of all logits together, each row centred."""
    return (logits - logits.mean(dim=1, keepdim=True)).square().sum().sqrt()
