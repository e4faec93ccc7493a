"""Tent-BN: insert a normalisation layer in front of the classifier and train it by entropy minimisation.

Iwasawa, Matsuo, Test-Time Classifier Adjustment Module for Model-Agnostic Domain Generalization, NeurIPS 2021: the
baseline that its authors call Tent-BN (`TentPreBN` in their library), for networks without BatchNorm layers.

    p_i = softmax(W (gamma (z_i - mean) / deviation + beta) + b),    L = (1/B) sum_i H(p_i)

with mean and (biased) deviation of each feature over the batch; gamma = 1 and beta = 0 at first.

Updates: gamma and beta only; the network stays as it is and is never back-propagated through. Needs: a linear
classifier. Output: from before the last update. One feature vector alone has no deviation: a batch of one is
predicted by the network as it is, and nothing is learnt from it. The default learning rate is the largest of the
authors' grid (5e-6, 5e-5, 5e-4).
"""

from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn import Parameter

from dpl.core.settings import setting
from dpl.methods.base import GradientMethod, Objective
from dpl.methods.registry import register
from dpl.methods.settings import GradientSettings
from dpl.network import Pass
from dpl.objectives import entropy

__all__ = ["TentPreBN", "TentPreBNSettings"]


@dataclass(frozen=True, kw_only=True)
class TentPreBNSettings(GradientSettings, lr=5e-4):
    """Settings of Tent-BN."""

    scope: Literal["affine"] = setting("affine", "the inserted layer trains, nothing else", choices=("affine",))


@register(
    "tent_prebn",
    paper="Iwasawa and Matsuo, Test-Time Classifier Adjustment Module, NeurIPS 2021 (Tent-BN)",
    updates="affine parameters of one normalisation layer inserted before the classifier",
    passes="1 forward, 1 backward through the classifier alone",
    needs_classifier=True,
    min_batch=2,
)
class TentPreBN(GradientMethod[TentPreBNSettings]):
    """Entropy minimisation through an inserted normalisation of the features."""

    settings_class = TentPreBNSettings
    predicts_jointly = True
    no_export = "it normalises the features of a batch by a layer that the network does not have"
    prebn: nn.BatchNorm1d

    def trained_parameters(self) -> dict[str, Parameter]:
        """Insert the layer; its parameters train."""
        width, network = self.network.classifier.in_features, self.network
        layer = nn.BatchNorm1d(width, track_running_stats=False, device=network.device, dtype=network.dtype)
        self.declare_module("prebn", layer)
        return {f"prebn.{name}": parameter for name, parameter in layer.named_parameters()}

    def step(self, images: Tensor) -> Tensor:
        """Run the network once, then update `steps` times on its features."""
        with torch.no_grad():
            plain = self.network(images)
        for _ in range(self.settings.steps):
            with torch.enable_grad():
                out = self._normalised(plain)
                self.update(Objective(entropy(out.logits).mean()), out)
        return self._normalised(plain).logits if self.settings.output == "after" else out.logits.detach()

    @torch.no_grad()
    def predict(self, images: Tensor) -> Tensor:
        """Predict through the inserted layer."""
        return self._normalised(self.network(images)).logits

    def _normalised(self, plain: Pass) -> Pass:
        if len(plain.z) < 2:
            return plain
        z = F.batch_norm(plain.z, None, None, self.prebn.weight, self.prebn.bias, training=True, eps=self.prebn.eps)
        logits = self.network.classifier(z)
        return replace(plain, logits=logits, features=z, reference=logits.detach(), whole=logits.detach())
