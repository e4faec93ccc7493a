"""Copy any network, and find its linear classifier: its input is the feature, its rows are the prototypes."""

import copy
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from dpl.core.errors import ModelError

__all__ = ["find_classifier", "guess_classifier", "logits_of", "private_copy", "watch_classifier"]


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
