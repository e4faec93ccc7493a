"""A penalty on leaving the source weights, strong for layers whose gradients do not change with the images' style."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Parameter

from dpl.core.errors import ModelError
from dpl.core.state import Stateful
from dpl.network import Network

__all__ = ["ShiftPenalty"]


class ShiftPenalty(Stateful):
    """sum_l w_l |theta_l - theta*_l|^2 over the layers before the classifier, theta* being the source's weights."""

    weights: Tensor  # w, one for each layer

    def __init__(self, network: Network, trainable: dict[str, Parameter]) -> None:
        super().__init__()
        self.network = network
        self.layers = _before_classifier(network, trainable)
        # The source's weights never change, so they are no state; `move` takes them along.
        self.source = [[p.detach().clone() for p in layer] for layer in self.layers]
        self.declare(weights=torch.ones(len(self.layers), device=network.device, dtype=network.dtype))

    def __call__(self) -> Tensor:
        """Return the penalty, a scalar."""
        drift = [_squared_distance(layer, source) for layer, source in zip(self.layers, self.source, strict=True)]
        return self.weights @ torch.stack(drift)

    def move(self, transfer: Callable[[Tensor], Tensor]) -> None:
        """Move the source's weights along with the state."""
        super().move(transfer)
        self.source = [[transfer(value) for value in layer] for layer in self.source]

    def weigh(self, alike: list[Tensor]) -> None:
        """Set w to the squared mean likeness (a list of `likeness`), scaled to 0..1 over the layers."""
        mean = torch.stack(alike).mean(dim=0)
        low, high = mean.aminmax()
        self.weights = ((mean - low) / (high - low).clamp(min=1e-12)).square()

    def likeness(self, image: Tensor, changed: Tensor, label: Tensor) -> Tensor:
        """Return for each layer the cosine between the gradients for a source image and for its changed version."""
        pairs = zip(self._gradients(image, label), self._gradients(changed, label), strict=True)
        return torch.stack([F.cosine_similarity(a, b, dim=0) for a, b in pairs])

    @torch.enable_grad()
    def _gradients(self, image: Tensor, label: Tensor) -> list[Tensor]:
        loss = F.cross_entropy(self.network(image[None]).logits, label[None])
        parameters = [p for layer in self.layers for p in layer]
        rows = iter(torch.autograd.grad(loss, parameters, materialize_grads=True))
        return [torch.cat([next(rows).flatten() for _ in layer]) for layer in self.layers]


def _before_classifier(network: Network, trainable: dict[str, Parameter]) -> list[list[Parameter]]:
    """Return the parameters that train outside the classifier, by the layer that owns them."""
    layers: dict[str, list[Parameter]] = {}
    classifier = f"{network.classifier_name}." if network.classifier_name else ""
    for name, parameter in trainable.items():
        if not name.startswith(classifier):
            layers.setdefault(name.rpartition(".")[0], []).append(parameter)
    if not layers:
        raise ModelError("no parameter before the classifier trains, and that is what swr_nsp regularises: scope='all'")
    return list(layers.values())


def _squared_distance(layer: list[Parameter], source: list[Tensor]) -> Tensor:
    return torch.stack([(p - value).square().sum() for p, value in zip(layer, source, strict=True)]).sum()
