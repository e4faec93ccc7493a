"""A network that knows more classes than a test set has: keep the classifier's rows of the test set's classes."""

from collections.abc import Sequence

import torch
from torch import nn

from dpl.core.errors import ModelError, SettingError
from dpl.network.split import find_classifier

__all__ = ["keep_classes"]


def keep_classes(network: nn.Module, outputs: Sequence[int], classifier: str | None = None) -> nn.Module:
    """Replace the linear classifier of `network` by one with the rows `outputs`, in this order; return the network.

    ImageNet-R and ImageNet-A are evaluated in this way: `keep_classes(network, benchmark.outputs)`.
    """
    name = find_classifier(network, classifier)
    layer = network.get_submodule(name)
    if not isinstance(layer, nn.Linear) or "weight" not in dict(layer.named_parameters()):
        raise ModelError(f"classifier {name!r} is not a plain nn.Linear; its rows cannot be selected")
    rows = torch.as_tensor(list(outputs), dtype=torch.long)
    if len(rows) < 2 or len(set(outputs)) < len(rows) or rows.min() < 0 or rows.max() >= layer.out_features:
        raise SettingError(f"outputs: expected at least two different numbers from 0 to {layer.out_features - 1}")
    kept = nn.Linear(layer.in_features, len(rows), layer.bias is not None, layer.weight.device, layer.weight.dtype)
    with torch.no_grad():
        kept.weight.copy_(layer.weight[rows])
        if layer.bias is not None:
            kept.bias.copy_(layer.bias[rows])
    parent, _, child = name.rpartition(".")
    setattr(network.get_submodule(parent), child, kept)
    return network
