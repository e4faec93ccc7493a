"""What RMT and SANTA share: a contrast of a sample's views with its nearest source prototype, through a projector."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn import Parameter

from dpl.core.random import Random
from dpl.methods.base import GradientMethod
from dpl.network import Pass
from dpl.objectives.contrastive import view_contrast

__all__ = ["declare_projector", "make_projector", "nearest_contrast", "nearest_prototype"]


def declare_projector(method: GradientMethod[Any], width: int) -> dict[str, Parameter]:
    """Declare a projector as `method.projector`; return its parameters by their name in the optimizer."""
    projector = make_projector(method.network.prototypes, width, method.random)
    method.declare_module("projector", projector)
    owner = method.info.name.partition("+")[0]
    return {f"{owner}.projector.{name}": parameter for name, parameter in projector.named_parameters()}


def nearest_contrast(projector: nn.Module, prototypes: Tensor, out: Pass, view: Pass, temperature: float) -> Tensor:
    """Contrast three views of each sample: its nearest source prototype, its feature, and that of an augmented one."""
    near = prototypes[nearest_prototype(out.z.detach(), prototypes)]
    return view_contrast(projector(torch.stack([near, out.z, view.z])), temperature)


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
