"""A learning rate of its own for the head of a network: its classifier, and a bottleneck before it."""

from collections.abc import Callable

from torch import nn
from torch.nn import Parameter

from dpl.core.optimizer import NamedOptimizer
from dpl.network import Network

__all__ = ["with_head_rate"]

Parameters = dict[str, Parameter]


def with_head_rate(
    make: Callable[[Parameters], NamedOptimizer], parameters: Parameters, network: Network, lr: float
) -> NamedOptimizer:
    """Make an optimizer in which the head's parameters, if there are any beside others, have the learning rate `lr`."""
    names = _head(network)
    head = {name: p for name, p in parameters.items() if name in names}
    body = {name: p for name, p in parameters.items() if name not in names}
    if not body or not head:
        return make(parameters)
    named = make(body | head)
    named.give_rate(head, lr)
    return named


def _head(network: Network) -> set[str]:
    """Return the names of the classifier's parameters and of a bottleneck's, which a BatchNorm1d gives away."""
    modules = dict(network.module.named_modules())
    owners = {network.classifier_name or ""}
    if any(isinstance(layer, nn.BatchNorm1d) for layer in modules.values()):
        owners |= {name for name, layer in modules.items() if isinstance(layer, (nn.Linear, nn.BatchNorm1d))}
    return {f"{owner}.{name}" for owner in owners for name, _ in modules[owner].named_parameters()}
