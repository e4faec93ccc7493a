"""The private copy of a network, with the places that methods need made reachable."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from dpl.core.errors import ModelError
from dpl.core.numerics import at_least_float32
from dpl.network.clipping import Clipping
from dpl.network.copying import private_copy
from dpl.network.linear import install_linear
from dpl.network.norm import NormControl, Running, install
from dpl.network.rows import install_convolutions
from dpl.network.scope import select
from dpl.network.selecting import Selecting, repeats_cheaply
from dpl.network.split import find_classifier, logits_of, watch_classifier
from dpl.network.style_layer import at_layer

__all__ = ["Network", "Pass"]


@dataclass(frozen=True)
class Pass:
    """One forward pass over a batch."""

    images: Tensor  # [B, ...]
    logits: Tensor  # [B, C]
    features: Tensor | None  # [B, d], the classifier's input
    maps: Tensor | None = None  # [B, ...], the output of a layer that was watched

    @cached_property
    def probabilities(self) -> Tensor:
        """Softmax of the logits, without gradient."""
        return at_least_float32(self.logits.detach()).softmax(dim=1)

    @property
    def z(self) -> Tensor:
        """The features, for methods that declared to need them."""
        if self.features is None:
            raise ModelError(
                "this network's classifier was not called in the forward pass; name it with classifier='...'"
            )
        return self.features

    def __getitem__(self, rows: slice | Tensor) -> "Pass":
        features, maps = (None if value is None else value[rows] for value in (self.features, self.maps))
        return Pass(self.images[rows], self.logits[rows], features, maps)


class Network:
    """A deep copy of the caller's classifier in evaluation mode, its BatchNorm layers under one control."""

    starts_anywhere = True  # may be run again from one of its layers on (see `surgery.replay`)

    def __init__(self, model: nn.Module, *, classifier: str | None = None, needs_classifier: bool = False) -> None:
        self.module = private_copy(model).eval()
        self.norm: NormControl = install(self.module)
        self._convolutions = install_convolutions(self.module, self.norm)
        install_linear(self.module, self._convolutions)
        self._selecting = Selecting(self.module, self._convolutions)
        self._clipping = Clipping(self.module)
        self.classifier_name = self._split(classifier, needs_classifier)
        self.confirmed = classifier is not None or self.classifier_name is None

    def _split(self, classifier: str | None, needed: bool) -> str | None:
        try:
            return find_classifier(self.module, classifier)
        except ModelError:
            if needed or classifier is not None:
                raise
            return None

    def __call__(
        self, images: Tensor, *, at: str | None = None, change: Callable[[Tensor], Tensor] | None = None
    ) -> Pass:
        """Run the network; with `at` and `change`, the output of that layer is passed through `change`."""
        if at is not None and change is not None:
            with at_layer(self.module, at, change):
                return self(images)
        if self.classifier_name is None:
            return Pass(images, self._logits(images), None)
        inputs: list[Tensor] = []
        handle = self.classifier.register_forward_pre_hook(lambda _layer, args: inputs.append(args[0]))
        try:
            logits = self._logits(images)
        finally:
            handle.remove()
        return Pass(images, logits, inputs[-1] if inputs else None)

    def _logits(self, images: Tensor) -> Tensor:
        logits = logits_of(self.module(images))
        return logits_of(self.module(images)) if self._clipping.fails() else logits

    def selecting(self, images: Tensor, *, watch: str | None = None) -> Pass:
        """Run the network for a loss that may select samples: what it does not select is not differentiated.

        The outputs are those of a plain call, with the maps of a layer to `watch` among them; nothing else inside the
        network may be watched or changed meanwhile.
        """
        norm, cpu = self.norm, images.device.type == "cpu" and not torch.is_autocast_enabled("cpu")
        learns = torch.is_grad_enabled() and not images.requires_grad  # the images' own gradient needs the whole graph
        whole = norm.rows is None and norm.groups == 1 and self.starts_anywhere
        parameters: list[Tensor] = [p for p in self.module.parameters() if p.requires_grad]
        able = cpu and learns and whole and bool(parameters) and self._repeats_cheaply
        if not able or not norm.keeps_samples_apart:
            return self._watching(images, watch)

        def run(batch: Tensor) -> Pass:
            with norm.using(Running()):
                return self._watching(batch, watch)

        return self._selecting(run, images, parameters)

    def _watching(self, images: Tensor, layer: str | None) -> Pass:
        if layer is None:
            return self(images)
        seen: list[Tensor] = []

        def look(maps: Tensor) -> Tensor:
            seen.append(maps)
            return maps

        return replace(self(images, at=layer, change=look), maps=seen[-1])

    @property
    def classifier(self) -> nn.Linear:
        """The linear layer that makes the logits."""
        if self.classifier_name is None:
            find_classifier(self.module)  # raises what was looked for
        layer: Any = self.module.get_submodule(self.classifier_name or "")
        return layer  # type: ignore[no-any-return]

    @cached_property
    def _repeats_cheaply(self) -> bool:
        return repeats_cheaply(self.module)

    @property
    def prototypes(self) -> Tensor:
        """The classifier's rows [C, d]; recomputed at each access where they are weight-normed."""
        layer = self.classifier
        direction, size = getattr(layer, "weight_v", None), getattr(layer, "weight_g", None)
        if isinstance(direction, Tensor) and isinstance(size, Tensor):
            return torch._weight_norm(direction, size, 0)
        return layer.weight

    @property
    def classes(self) -> int:
        """The number of classes, C."""
        return self.classifier.out_features

    @property
    def device(self) -> torch.device:
        """Where the network lives."""
        return next((p.device for p in self.module.parameters()), torch.device("cpu"))

    @property
    def dtype(self) -> torch.dtype:
        """The network's floating-point type."""
        return next((p.dtype for p in self.module.parameters() if p.is_floating_point()), torch.float32)

    def train_only(self, scope: str, start: str | None = None) -> dict[str, Parameter]:
        """Make the parameters of `scope` (from the module `start` on) trainable, all others not; return those."""
        if scope in ("classifier", "features"):
            _ = self.classifier  # raises if there is none to tell apart
        self._convolutions.steady = True
        return select(self.module, scope, self.classifier_name, start)

    @torch.no_grad()
    def infer(self, images: Tensor) -> Tensor:
        """Return the logits, and compute nothing else."""
        return logits_of(self.module(images))

    def differentiate(self, images: Tensor) -> None:
        """Run the batch forward, and back through what trains if anything does; keep nothing."""
        parameters = [p for p in self.module.parameters() if p.requires_grad]
        with torch.set_grad_enabled(bool(parameters)):
            value = self._logits(images).float().square().mean()
        if value.requires_grad:
            torch.autograd.grad(value, parameters, allow_unused=True)

    def watch(self, images: Tensor) -> bool:
        """Run one image; confirm the classifier by it, and return False if another one was found and taken instead."""
        guess = self.classifier_name
        with self.norm.using(Running()), torch.no_grad():
            if guess is None or self.confirmed:
                logits_of(self.module(images[:1]))
            else:
                self.classifier_name = watch_classifier(self.module, images[:1], guess)
        self.confirmed = True
        return self.classifier_name == guess
