"""Leave the top of a network alone, as SAR and DeYO do: its layers are the most sensitive."""

from collections.abc import Mapping, Sequence

from torch import nn
from torch.nn import Parameter

from dpl.core.errors import ModelError

__all__ = ["TOP_LAYERS", "below_top"]

# The last stage of a ResNet; the last three blocks and the last norm of a ViT-Base or a Mixer-B with 12 blocks.
TOP_LAYERS = ("layer4", "blocks.9", "blocks.10", "blocks.11", "norm")


def below_top(module: nn.Module, parameters: Mapping[str, Parameter], top: Sequence[str]) -> dict[str, Parameter]:
    """Return the parameters outside the named modules, and stop the gradients of the others.

    Names count from the network itself, inside wrappers (such as one that normalises its input).
    """
    prefix = _wrappers(module)
    names = (top,) if isinstance(top, str) else top
    owners = tuple(f"{prefix}{name}." for name in names)
    below = {name: parameter for name, parameter in parameters.items() if not name.startswith(owners)}
    if not below:
        raise ModelError(f"frozen_modules={tuple(names)!r} leaves no parameter to train; name fewer modules, or none")
    for name, parameter in parameters.items():
        parameter.requires_grad_(name in below)
    return below


def _wrappers(module: nn.Module) -> str:
    """Return the dotted path (with a dot at its end) through modules with one child that has parameters."""
    path = ""
    while True:
        children = [(name, child) for name, child in module.named_children() if any(True for _ in child.parameters())]
        if len(children) != 1 or any(True for _ in module.parameters(recurse=False)):
            return path
        path, module = f"{path}{children[0][0]}.", children[0][1]
