"""Copy any network, find its linear classifier, and choose the parameters that train.

The classifier's input is the feature, its rows are the prototypes.
"""

import copy
from collections.abc import Iterable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.nn.modules.batchnorm import _NormBase

from dpl.core.errors import ModelError

__all__ = [
    "NORMS", "SCOPES", "find_classifier", "guess_classifier", "logits_of", "private_copy", "select_parameters",
    "watch_classifier",
]  # fmt: skip

SCOPES = ("affine", "classifier", "features", "all")
NORMS = (_NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)


def private_copy(module: nn.Module) -> nn.Module:
    """Deep-copy `module`, including weight-normed layers whose computed weight refuses to be copied."""
    tensors = (value for child in module.modules() for value in vars(child).values() if isinstance(value, Tensor))
    memo: dict[int, Any] = {id(value): value.detach().clone() for value in tensors if not value.is_leaf}
    return copy.deepcopy(module, memo)  # without a graph: what is no leaf is recomputed at each forward


def logits_of(output: Any) -> Tensor:
    """Return the logits in a network's output: a tensor, or what Hugging Face models return."""
    if isinstance(output, dict):
        output = output.get("logits")
    logits = getattr(output, "logits", output)
    if not isinstance(logits, Tensor) or logits.ndim != 2:
        shape = tuple(logits.shape) if isinstance(logits, Tensor) else type(output).__name__
        raise ModelError(f"the network returned {shape}; expected logits of shape [batch, classes]")
    return logits


def find_classifier(module: nn.Module, name: str | None = None) -> str:
    """Return the name of the linear classifier without running the network.

    A given name is checked. Otherwise timm's `get_classifier` is called, on the network or on whatever it wraps. Then
    the last `nn.Linear` is assumed, which `watch_classifier` confirms or corrects on the first batch.
    """
    linears = _linear_layers(module)
    if name is not None and name not in linears:
        listed = _listed(linears)
        raise ModelError(f"classifier={name!r} is not an nn.Linear of this network; its linear layers: {listed}")
    found = name or guess_classifier(module)
    if found is None:
        raise ModelError(
            "no nn.Linear found in this network, and a linear classifier is needed here (timm's get_classifier() and "
            "all submodules were searched); use a method or scope that works without, e.g. 'tent' with scope='affine'"
        )
    return found


def guess_classifier(module: nn.Module) -> str | None:
    """Return the name of what timm calls the classifier, or of the last `nn.Linear`; None if there is none."""
    linears = _linear_layers(module)
    getters = (getattr(child, "get_classifier", None) for child in module.modules())
    heads = (getter() for getter in getters if callable(getter))
    named = (key for head in heads for key, layer in linears.items() if layer is head)
    return next(named, None) or next(reversed(linears), None)


def watch_classifier(module: nn.Module, images: Tensor, guess: str) -> str:
    """Return the name of the `nn.Linear` that made the logits of `images`, by watching one forward pass."""
    names = {layer: key for key, layer in _linear_layers(module).items()}
    outputs: dict[str, Tensor] = {}
    with torch.no_grad(), ExitStack() as hooks:
        for layer in names:
            hook = layer.register_forward_hook(lambda layer, _inputs, output: outputs.__setitem__(names[layer], output))
            hooks.enter_context(hook)
        logits = logits_of(module(images))
    same_shape = [key for key, output in outputs.items() if output.shape == logits.shape]
    made = [key for key in same_shape if torch.equal(outputs[key], logits)] or same_shape
    if not made:
        raise ModelError(
            f"none of the linear layers ({_listed(outputs)}) made the logits {tuple(logits.shape)}; "
            "name the classifier with classifier='...'"
        )
    return guess if guess in made else made[-1]


def _linear_layers(module: nn.Module) -> dict[str, nn.Linear]:
    return {key: layer for key, layer in module.named_modules() if isinstance(layer, nn.Linear)}


def _listed(names: dict[str, Any]) -> str:
    keys = list(names)
    return ", ".join(keys[-6:]) if len(keys) <= 6 else "..., " + ", ".join(keys[-6:])


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
