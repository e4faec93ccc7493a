"""What contrasts with source prototypes share: a small projector of features, and the nearest prototype."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpl.core.random import Random

__all__ = ["make_projector", "nearest_prototype"]


def make_projector(prototypes: Tensor, width: int, random: Random) -> nn.Module:
    """Return two linear layers with a ReLU between them, from the width of the prototypes to `width` (0: none)."""
    if width == 0:
        return nn.Identity()
    layers = []
    for inputs in (prototypes.shape[1], width):
        layer = nn.utils.skip_init(nn.Linear, inputs, width, dtype=prototypes.dtype)  # type: ignore[no-untyped-call]
        for parameter in layer.parameters():  # torch's own distribution, drawn from the method's generator
            nn.init.uniform_(parameter, -(inputs**-0.5), inputs**-0.5, random.generator)
        layers.append(layer)
    return nn.Sequential(layers[0], nn.ReLU(), layers[1]).to(prototypes.device)


def nearest_prototype(features: Tensor, prototypes: Tensor) -> Tensor:
    """Return the class whose prototype has the largest cosine with each feature, [B, d] -> [B].

    One product with unit prototypes is enough: the length of a feature does not change the order.
    """
    similarity = features.to(prototypes.dtype) @ F.normalize(prototypes, dim=1).T
    return similarity.masked_fill((prototypes == 0).all(dim=1), -torch.inf).argmax(dim=1)
