"""The named sets of trainable parameters."""

from collections.abc import Iterable

from torch import nn
from torch.nn import Parameter
from torch.nn.modules.batchnorm import _NormBase

from dpl.core.errors import ModelError
from dpl.network.split import find_classifier

__all__ = ["NORMS", "SCOPES", "select_parameters"]

SCOPES = ("affine", "classifier", "features", "all")
NORMS = (_NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)


def select_parameters(
    module: nn.Module, scope: str, classifier: str | None, train_from: str | None = None
) -> dict[str, Parameter]:
    """Make the parameters of `scope` (from the module `train_from` on) trainable, no others; return them by name."""
    floats = {name for name, parameter in module.named_parameters() if parameter.is_floating_point()}
    norms = [name for name, layer in module.named_modules() if isinstance(layer, NORMS)]
    splits = scope in ("classifier", "features")
    head = _inside(floats, [classifier or find_classifier(module)] if splits else [])
    chosen = {"affine": _inside(floats, norms), "classifier": head, "features": floats - head, "all": floats}[scope]
    if train_from is not None:
        chosen &= _from(module, train_from)
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(name in chosen)
    if not chosen:
        raise ModelError(
            f"scope={scope!r} selects no parameter of this network"
            + (f" from train_from={train_from!r} on" if train_from is not None else "")
            + ("; it has no affine normalisation layer: try scope='all'" if scope == "affine" else "")
        )
    return {name: parameter for name, parameter in module.named_parameters() if name in chosen}


def _inside(parameters: set[str], modules: Iterable[str]) -> set[str]:
    """Return the parameters that lie inside these modules; the network itself has no name."""
    begins = tuple(f"{module}." if module else "" for module in modules)
    return {name for name in parameters if name.startswith(begins)}


def _from(module: nn.Module, train_from: str) -> set[str]:
    """Return the names of the parameters that are defined in the module `train_from` or after it."""
    owners = [name for name, _ in module.named_modules() if name]
    places = [i for i, name in enumerate(owners) if f".{name}".endswith(f".{train_from}")]  # also inside wrappers
    if not places:
        raise ModelError(
            f"train_from={train_from!r} is not a module of this network; it has {', '.join(owners[:12])}, ..."
        )
    later = set(owners[places[0] :])
    return {name for name, _ in module.named_parameters() if name.rpartition(".")[0] in later}
