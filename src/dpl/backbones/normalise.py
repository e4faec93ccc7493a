"""Input normalisation as the first layer, so that every network takes images in [0, 1]."""

import math
from collections.abc import Sequence
from contextlib import suppress

import torch
from torch import Tensor, nn

from dpl.core.errors import SettingError

__all__ = ["PRESETS", "Normalise", "Normalized", "bare", "with_normalisation"]

Normalise = str | Sequence[Sequence[float]]
"""The name of a preset, "none", or a pair (mean, std) with one value per channel."""

PRESETS: dict[str, tuple[tuple[float, ...], tuple[float, ...]]] = {
    "imagenet": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    "cifar": ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
}


class Normalized(nn.Module):
    """`network` behind the fixed map (images - mean) / std; the state dict does not contain the statistics."""

    mean: Tensor
    std: Tensor

    def __init__(self, network: nn.Module, mean: Sequence[float], std: Sequence[float]) -> None:
        super().__init__()
        self.register_buffer("mean", torch.tensor(mean).view(-1, 1, 1), persistent=False)
        self.register_buffer("std", torch.tensor(std).view(-1, 1, 1), persistent=False)
        self.network = network

    def forward(self, images: Tensor) -> Tensor:
        """Return the network's logits for images in [0, 1]."""
        logits: Tensor = self.network((images - self.mean) / self.std)
        return logits


def bare(network: nn.Module) -> nn.Module:
    """Return the network inside `Normalized`, or the network itself."""
    return network.network if isinstance(network, Normalized) else network


def with_normalisation(network: nn.Module, normalise: Normalise) -> nn.Module:
    """Return `network` behind its normalisation layer, or itself if `normalise` is "none"."""
    if normalise == "none":
        return network
    pair = PRESETS.get(normalise, ()) if isinstance(normalise, str) else normalise
    with suppress(TypeError, ValueError):
        mean, std = ([float(value) for value in values] for values in pair)
        if len(mean) == len(std) and min(std) > 0 and all(map(math.isfinite, (*mean, *std))):
            return Normalized(network, mean, std)
    raise SettingError(
        f"normalise={normalise!r}: expected one of {', '.join(sorted(PRESETS))}, none, or a pair (mean, std) with one "
        "finite value per channel, std above 0."
    )
