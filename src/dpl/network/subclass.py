"""Layers of the private copy behave otherwise through a subclass of their own class, and can be put back.

Parameters, buffers, names and whatever else a layer has stay as they are; only `forward` is another.
"""

from collections.abc import Callable
from typing import Any

from torch import nn

__all__ = ["Subclasses", "put_back"]

Forward = Callable[..., Any]


class Subclasses:
    """One subclass for each kind of layer; `make_forward` gets a layer's class and returns the new forward."""

    def __init__(self, make_forward: Callable[[type[nn.Module]], Forward]) -> None:
        self._make_forward = make_forward
        self._known: dict[type[nn.Module], type[nn.Module]] = {}

    def take(self, layer: nn.Module, **attributes: object) -> None:
        """Give a layer its subclass, and attributes that are no part of its state."""
        original = _original_class(layer)
        if original not in self._known:
            added = {"forward": self._make_forward(original), "original_class": original}
            self._known[original] = type(original.__name__, (original,), added)
        layer.__class__ = self._known[original]
        vars(layer).update(attributes)


def put_back(layer: nn.Module, *attributes: str) -> None:
    """Give a layer its own class back, and take the attributes away."""
    layer.__class__ = _original_class(layer)
    for name in attributes:
        vars(layer).pop(name, None)


def _original_class(layer: nn.Module) -> type[nn.Module]:
    return getattr(type(layer), "original_class", type(layer))
