"""A private copy of the caller's classifier, run through one call, with the places that methods need made reachable."""

import hashlib
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from dpl.core.errors import DplError, InputError, ModelError
from dpl.core.numerics import at_least_float32
from dpl.network.norm_control import NormControl, RunningStatistics, Statistics, install
from dpl.network.split import find_classifier, guess_classifier, logits_of, private_copy, watch_classifier
from dpl.network.style_layer import at_layer

__all__ = ["Network", "Pass"]


@dataclass(frozen=True)
class Pass:
    """One forward pass over a batch, or over those of its images that a loss may learn from.

    Samples are labelled and selected by `reference`. The gradient comes from `logits` and `z`.
    """

    images: Tensor  # [n, ...]
    logits: Tensor  # [n, C], with a graph where one was asked for
    features: Tensor | None  # [n, d], the classifier's input
    reference: Tensor  # [n, C], logits without a graph
    whole: Tensor  # [B, C], the reference logits of the whole batch: its prediction
    originals: int  # the first rows are the batch's own images; restyled copies may follow
    candidates: Tensor | None = None  # [B], which samples of the batch a loss may learn from; None: all
    maps: Tensor | None = None  # [B, ...], the whole batch at the network's `style_layer`, without a graph
    statistics: Statistics = field(default_factory=dict)  # that BatchNorm used for the whole batch; kept with the maps

    @cached_property
    def probabilities(self) -> Tensor:
        """Softmax of the reference logits."""
        return at_least_float32(self.reference).softmax(dim=1)

    @property
    def z(self) -> Tensor:
        """The features, for methods that registered with `needs_classifier`."""
        if self.features is None:
            raise ModelError(
                "this network's classifier was not called in the forward pass; name it with classifier='...'"
            )
        return self.features

    def first(self, count: int) -> "Pass":
        """Return the pass of the first images, as if they were the whole batch."""
        features = None if self.features is None else self.features[:count]
        maps = None if self.maps is None else self.maps[:count]
        images, logits, reference = self.images[:count], self.logits[:count], self.reference[:count]
        return Pass(images, logits, features, reference, reference, count, maps=maps, statistics=self.statistics)

    def share(self, mask: Tensor) -> Tensor:
        """Return the fraction of the whole batch that a mask over this pass's own images selects."""
        return mask[: self.originals].sum() / len(self.whole)


class Network:
    """A deep copy in evaluation mode whose BatchNorm layers follow one control; the caller's object is not touched."""

    def __init__(self, model: nn.Module, *, classifier: str | None = None, needs_classifier: bool = False) -> None:
        self.module = private_copy(model).eval()
        self.norm: NormControl = install(self.module)
        required = needs_classifier or classifier is not None
        self.classifier_name = find_classifier(self.module, classifier) if required else guess_classifier(self.module)
        self.confirmed = classifier is not None or self.classifier_name is None
        self.per_sample = True  # the output for an image does not depend on the others; `confirm` tests it
        self.style_layer: str | None = None  # whose maps each pass keeps
        self.update_references()

    def update_references(self) -> None:
        """Look up the classifier, the device and the type; called again after a move."""
        name = self.classifier_name
        self._classifier: Any = None if name is None else self.module.get_submodule(name)
        first = next((value for value in self.module.parameters() if value.is_floating_point()), torch.empty(0))
        self.device, self.dtype = first.device, first.dtype

    def fingerprint(self) -> str:
        """Hash the weights, so that a snapshot is never loaded onto another model."""
        digest = hashlib.sha256()
        for name, value in self.module.state_dict().items():
            digest.update(f"{name}{tuple(value.shape)}".encode())
            digest.update(value.detach().to("cpu", torch.float32).contiguous().numpy().tobytes())
        return digest.hexdigest()

    def __call__(self, images: Tensor) -> Pass:
        """Run the network and keep its classifier's input; a graph is made if gradients are enabled."""
        inputs: dict[Any, tuple[Tensor, ...]] = {}  # of the classifier
        maps: list[Tensor] = []  # at the style layer
        statistics: Statistics = {}
        with ExitStack() as hooks:
            if self._classifier is not None:
                hooks.enter_context(self._classifier.register_forward_pre_hook(inputs.__setitem__))
            if self.style_layer is not None:
                hooks.enter_context(at_layer(self.module, self.style_layer, maps.append))
                statistics = hooks.enter_context(self.norm.recording())
            torch.clear_autocast_cache()  # it keeps weights as they were, and those of a pass without a graph
            output = self.module(images)
        logits: Tensor = output if isinstance(output, Tensor) and output.ndim == 2 else logits_of(output)
        reference = logits.detach()
        features = inputs[self._classifier][0] if inputs else None
        style = maps[0].detach() if maps else None
        return Pass(images, logits, features, reference, reference, len(images), maps=style, statistics=statistics)

    @property
    def samples_are_independent(self) -> bool:
        """Whether a pass over some images gives each of them the output of a pass over the whole batch."""
        return self.per_sample and (not self.norm.layers or isinstance(self.norm.rule, RunningStatistics))

    @property
    def classifier(self) -> nn.Linear:
        """The linear layer that makes the logits."""
        if self._classifier is None:
            find_classifier(self.module)  # raises an error that says what was looked for
        return self._classifier  # type: ignore[no-any-return]

    @property
    def prototypes(self) -> Tensor:
        """W, the classifier's rows [C, d]; recomputed at each access where they are weight-normed."""
        layer: Any = self._classifier or self.classifier
        if hasattr(layer, "weight_v"):
            return torch._weight_norm(layer.weight_v, layer.weight_g)
        return layer.weight  # type: ignore[no-any-return]

    @property
    def classes(self) -> int:
        """The number of classes, C."""
        return self.classifier.out_features

    @torch.no_grad()
    def confirm(self, images: Tensor) -> bool:
        """Run images of a new shape before anything can change; return whether the assumed classifier is the right one.

        The first run shows which layer makes the logits. A second one shows whether images influence each other.
        """
        assumed = self.classifier_name
        pair = torch.cat([images[:1], images[:1].flip(-1) / 2])
        try:
            with self.norm.using(RunningStatistics()):
                if not self.confirmed and assumed is not None:
                    self.classifier_name = watch_classifier(self.module, images[:1], assumed)
                together, alone = logits_of(self.module(pair))[1:], logits_of(self.module(pair[1:]))
        except DplError:
            raise
        except (RuntimeError, ValueError, AssertionError, IndexError, TypeError) as error:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise InputError(f"the network refused images of shape {tuple(images.shape)}: {reason}") from error
        self.per_sample = self.per_sample and torch.allclose(together, alone, rtol=1e-3, atol=1e-4)
        self.confirmed = True
        self.update_references()
        return self.classifier_name == assumed
