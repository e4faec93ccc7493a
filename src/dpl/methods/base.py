"""The contract of a method, and the loop that gradient methods share.

A method sees a private network and batches of images; it never sees a label, a data set or a file. A simple
one is a settings class and a `loss`; one with a loop of its own overrides `step`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import ClassVar, Generic, TypeVar

import torch
from torch import Tensor
from torch.nn import Parameter

from dpl.core.errors import SettingError
from dpl.core.optimizer import NamedOptimizer
from dpl.core.random import Random
from dpl.core.state import Stateful
from dpl.methods.parts.norm_choice import NormChoice
from dpl.methods.registry import MethodInfo
from dpl.methods.settings import GradientSettings, Settings
from dpl.network import Network, Pass
from dpl.network.norm import Chosen, has_statistics, parse_norm

__all__ = ["Fact", "GradientMethod", "Method", "Objective", "Source", "Term"]

Fact = Tensor | float | int | str | bool
Source = Iterable[tuple[Tensor, Tensor]]
S = TypeVar("S", bound=Settings)
G = TypeVar("G", bound=GradientSettings)


@dataclass
class Objective:
    """A loss, whether there is anything to learn from (None: always), and facts for the record."""

    value: Tensor
    active: Tensor | None = None
    facts: dict[str, Fact] = field(default_factory=dict)

    @property
    def selected(self) -> Fact | None:
        """The share of the batch that the loss learns from, where it was recorded."""
        return self.facts.get("selected", self.facts.get("confident"))

    def __add__(self, other: Objective) -> Objective:
        """Add two losses; the sum is worth a step if either is."""
        both = None if self.active is None or other.active is None else self.active | other.active
        return Objective(self.value + other.value, both, self.facts | other.facts)


class Method(Stateful, Generic[S]):
    """Predicts, and adapts its network while it does."""

    info: ClassVar[MethodInfo]
    settings_class: ClassVar[type[Settings]] = Settings

    def __init__(self, network: Network, settings: S) -> None:
        super().__init__()
        self.network = network
        self.settings = settings
        self.facts: dict[str, Fact] = {}
        self.random = Random(settings.seed, network.device)
        self.norm_choice: NormChoice | None = None
        network.norm.rule = rule = parse_norm(settings.norm)
        if isinstance(rule, Chosen) and has_statistics(network.module):
            self.declare_part("norm_choice", NormChoice(network, rule))
        network.module.requires_grad_(False)

    @property
    def optimizers(self) -> dict[str, NamedOptimizer]:
        """The optimizers whose state is part of the method's."""
        return {}

    @property
    def trainable(self) -> dict[str, Parameter]:
        """The parameters that this method trains, by name."""
        return {name: p for optimizer in self.optimizers.values() for name, p in optimizer.parameters.items()}

    def due(self) -> bool:
        """Count a batch, and say whether the method learns from it."""
        return True

    def attach(self, source: Source | None) -> None:
        """Keep the source batches, for methods that read them at every step (also after a snapshot was loaded)."""

    def prepare(self, source: Source | None) -> None:
        """Compute what must be known before the first batch from labelled source batches (images, labels)."""

    def act(self, images: Tensor) -> Tensor:
        """Choose what is chosen from the stream (norm="auto"), then predict the batch and adapt to it."""
        if self.norm_choice is None:
            return self.step(images)
        self.norm_choice.look(images)
        logits = self.step(images)
        self.facts["norm"] = self.norm_choice.share
        return logits

    def step(self, images: Tensor) -> Tensor:
        """Predict a batch and adapt to it; return the logits."""
        self.facts = {"updated": False, "reason": "this method only predicts"}
        return self.predict(images)

    @torch.no_grad()
    def predict(self, images: Tensor) -> Tensor:
        """Predict a batch and change nothing."""
        return self.network(images).logits


class Term(Stateful):
    """A loss that can be added to any gradient method's own, on the same forward pass."""

    def __call__(self, out: Pass) -> Objective:
        """Return the term's objective for one pass."""
        raise NotImplementedError


class GradientMethod(Method[G]):
    """Predict, compute a loss, step: `steps` times for each batch."""

    settings_class: ClassVar[type[Settings]] = GradientSettings
    batches: int

    def __init__(self, network: Network, settings: G) -> None:
        super().__init__(network, settings)
        self.declare(batches=0)
        self.terms: list[Term] = []
        self.optimizer = self.make_optimizer(self.select())

    def due(self) -> bool:
        """Say whether this batch is learnt from: every `interval`-th one is, beginning with the first."""
        if self.settings.interval == 1:
            return True  # nothing to count, and a batch that teaches nothing changes nothing
        self.batches += 1
        return (self.batches - 1) % self.settings.interval == 0

    def select(self) -> dict[str, Parameter]:
        """Return the parameters that train; methods with modules of their own add those."""
        return self.network.train_only(self.settings.scope, self.settings.start)

    def make_optimizer(self, parameters: dict[str, Parameter]) -> NamedOptimizer:
        """Return the optimizer that the settings ask for."""
        s = self.settings
        return NamedOptimizer(parameters, s.optimizer, s.lr, s.weight_decay)

    @property
    def optimizers(self) -> dict[str, NamedOptimizer]:
        """The one optimizer."""
        return {"optimizer": self.optimizer}

    def loss(self, out: Pass) -> Objective:
        """Return what to minimise, given the forward pass of a batch."""
        raise NotImplementedError

    def step(self, images: Tensor) -> Tensor:
        """Predict, then update, `steps` times."""
        for _ in range(self.settings.steps):
            with torch.enable_grad():
                out = self.network.selecting(images)
                self.update(self.loss(out), out)
        return self.answer(images, out.logits)

    def answer(self, images: Tensor, logits: Tensor) -> Tensor:
        """Return the logits from before or after the last update, as the settings say."""
        return self.predict(images) if self.settings.output == "after" else logits.detach()

    def update(self, objective: Objective, out: Pass) -> None:
        """Add the terms, take one optimizer step if there is reason to, and record what happened."""
        total = self.total(objective, out)
        finite = total.value.detach().isfinite()
        active = finite if total.active is None else finite & total.active
        if self.settings.least > 0 and total.selected is not None:
            active = active & (torch.as_tensor(total.selected, device=active.device) >= self.settings.least)
        updated = self.optimizer.step(total.value, active)
        self.facts = {"loss": total.value.detach(), **total.facts, "updated": updated}
        if updated is False:  # known on the host
            few = "too few samples" if self.settings.least > 0 else "no sample"
            self.facts["reason"] = f"{few} to learn from" if bool(finite) else "the loss is not finite"

    def total(self, objective: Objective, out: Pass) -> Objective:
        """Return the method's objective plus all added terms."""
        for term in self.terms:
            objective = objective + term(out)
        return objective

    def require_source(self, source: Source | None, relative: str) -> Source:
        """Return the source batches, or say what is needed and which method does without."""
        if source is None:
            raise SettingError(
                f"{self.info.name!r} needs labelled source data: pass source=, a loader (or list) of (images, labels) "
                f"batches or one such pair of tensors; without source data use {relative!r}"
            )
        return source
