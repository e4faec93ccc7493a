"""The named sets of trainable parameters."""

from torch import nn
from torch.nn import Parameter
from torch.nn.modules.batchnorm import _NormBase

from dpl.core.errors import ModelError

__all__ = ["NORMS", "SCOPES", "select_parameters"]

SCOPES = ("affine", "classifier", "features", "all")
NORMS = (_NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)


def select_parameters(
    module: nn.Module, scope: str, classifier: str | None, train_from: str | None = None
) -> dict[str, Parameter]:
    """Make the parameters of `scope` (from the module `train_from` on) trainable, no others; return them by name."""
    head = set() if classifier is None else _below(module, [classifier])
    everything = {name for name, parameter in module.named_parameters() if parameter.is_floating_point()}
    chosen = {
        "affine": _below(module, [name for name, layer in module.named_modules() if isinstance(layer, NORMS)]),
        "classifier": head,
        "features": everything - head,
        "all": everything,
    }[scope]
    if train_from is not None:
        chosen = chosen & _from(module, train_from)
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(name in chosen)
    if not chosen:
        raise ModelError(
            f"scope={scope!r} selects no parameter of this network"
            + (f" from train_from={train_from!r} on" if train_from is not None else "")
            + ("; it has no affine normalisation layer: try scope='all'" if scope == "affine" else "")
        )
    return {name: parameter for name, parameter in module.named_parameters() if name in chosen}


def _from(module: nn.Module, train_from: str) -> set[str]:
    """Return the names of the parameters that are defined in the module `train_from` or after it."""
    names = [name for name, _ in module.named_modules() if name]
    first = next((n for n in names if n == train_from or n.endswith(f".{train_from}")), None)  # also inside wrappers
    if first is None:
        raise ModelError(
            f"train_from={train_from!r} is not a module of this network; it has {', '.join(names[:12])}, ..."
        )
    kept, reached = set(), False
    for owner, layer in module.named_modules():
        reached = reached or owner == first
        if reached:
            kept |= {f"{owner}.{name}" for name, _ in layer.named_parameters(recurse=False)}
    return kept


def _below(module: nn.Module, owners: list[str]) -> set[str]:
    """Return the names of the parameters inside the named modules."""
    return {
        f"{owner}.{name}" if owner else name
        for owner in owners
        for name, _ in module.get_submodule(owner).named_parameters()
    }
