"""The contract of a method, and the step that gradient methods share.

A method sees a private network and batches of images: never a label, a data set or a file. A simple one is a settings
class and a `loss`; one with a loop of its own overrides `step`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Generic, Self, TypeVar

import torch
from torch import Tensor
from torch.nn import Parameter

from dpl.core.errors import SettingError
from dpl.core.optimizer import NamedOptimizer
from dpl.core.random import Random
from dpl.core.state import Stateful
from dpl.methods.parts.effective_batch import EffectiveBatch
from dpl.methods.parts.mixed_stream import OfStream
from dpl.methods.parts.norm_rules import AutoBlend, RunningStatistics, StreamRule, parse_norm
from dpl.methods.parts.top_layers import below_top
from dpl.methods.registry import MethodInfo
from dpl.methods.settings import GradientSettings, Settings
from dpl.network import Network, Pass
from dpl.network.norm_control import TargetStatistics
from dpl.network.split import select_parameters
from dpl.views import seeded

__all__ = ["Fact", "GradientMethod", "Method", "Objective", "Source", "Term"]

Fact = Tensor | float | int | str | bool
Source = Iterable[tuple[Tensor, Tensor]]
S = TypeVar("S", bound=Settings)
G = TypeVar("G", bound=GradientSettings)

# Share of a batch up to which a second pass over the selected samples is cheaper than a graph over the whole batch,
# by what trains (benchmarks/second_pass.py). A classifier's own graph is cheaper than any second pass.
_FEW = {"all": 0.7, "features": 0.7, "affine": 0.5, "classifier": 0.0}


@dataclass
class Objective:
    """A loss, whether there is anything to learn from (None: always), facts for `model.last`, why it may not step."""

    value: Tensor
    should_step: Tensor | None = None
    facts: dict[str, Fact] = field(default_factory=dict)
    reason: str = "no sample to learn from"

    @property
    def selected(self) -> Fact | None:
        """The share of the batch that the loss learns from, where it was recorded."""
        return self.facts.get("selected", self.facts.get("confident"))

    def __add__(self, other: Objective) -> Objective:
        """Add two losses. One with nothing to learn from adds nothing; the sum is worth a step if either is."""
        flags = self.should_step, other.should_step
        either = None if flags[0] is None or flags[1] is None else flags[0] | flags[1]
        return Objective(self._learnable + other._learnable, either, self.facts | other.facts, self.reason)

    def __rmul__(self, weight: float) -> Objective:
        """Weight the loss."""
        return replace(self, value=weight * self.value)

    @property
    def _learnable(self) -> Tensor:
        """The value, or zero where there is nothing to learn from: Adam would make full steps of a rounding rest."""
        return self.value if self.should_step is None else self.value.where(self.should_step, 0)


class Method(Stateful, Generic[S]):
    """Predicts, and adapts its network while it does."""

    info: ClassVar[MethodInfo]
    settings_class: ClassVar[type[Settings]] = Settings
    no_export: str = ""  # why no plain network can give this method's predictions
    predicts_jointly: ClassVar[bool] = False  # the prediction of an image depends on its batch, whatever `norm` is
    commits_last: ClassVar[bool] = False  # nothing that can fail comes after the optimizer's (only) step
    augment: Callable[[Tensor], Tensor]  # of methods that make views

    def __init__(self, network: Network, settings: S) -> None:
        super().__init__()
        self.network, self.settings = network, settings
        self.facts: dict[str, Fact] = {}
        self.random = Random(settings.seed, network.device)
        given = [getattr(settings, name, None) for name in ("augment", "weak", "strong")]
        self.makes_views = self.info.views and not any(given)  # the built-in ones, which need images in [0, 1]
        self.effective_batch: EffectiveBatch | None = None
        network.norm.rule = rule = parse_norm(settings.norm, settings.norm_prior, settings.norm_shift)
        if isinstance(rule, AutoBlend):
            self.declare_part("effective_batch", EffectiveBatch(rule, network.device))
        if isinstance(rule, StreamRule):
            rule.attach(network.norm, self.random)
            self.declare_part("norm_rule", rule)
        self.target_statistics: TargetStatistics | None = None
        if network.norm.layers and not isinstance(rule, RunningStatistics):
            self.declare_part("target_statistics", TargetStatistics())
        network.module.requires_grad_(False)

    @classmethod
    def for_settings(cls, settings: Settings) -> type[Self]:
        """Return the class to build for these settings."""
        return cls

    @property
    def optimizers(self) -> dict[str, NamedOptimizer]:
        """The optimizers whose state is part of the method's."""
        return {}

    @property
    def of_stream(self) -> dict[str, OfStream]:
        """The parts that know the stream, by name: they measure it with the source model."""
        return {name: part for name, part in self.parts().items() if isinstance(part, OfStream)}

    @property
    def trainable(self) -> dict[str, Parameter]:
        """The parameters that this method trains, by name."""
        return {name: p for optimizer in self.optimizers.values() for name, p in optimizer.parameters.items()}

    @property
    def predicting(self) -> Network:
        """The network whose logits are the prediction."""
        return self.network

    def exported_classifier(self) -> tuple[Tensor, Tensor | None] | None:
        """Return weight [C, d] and bias of the linear classifier that predicts, if it is not the network's own."""
        return None

    def attach(self, source: Source | None) -> None:
        """Keep the source batches, for methods that read them at every step (also after a snapshot was loaded)."""

    def prepare(self, source: Source | None) -> None:
        """Compute what must be known before the first batch from labelled source batches (images, labels)."""

    def __call__(self, images: Tensor) -> Tensor:
        """Predict a batch and adapt to it; return the logits."""
        if len(images) < self.info.min_batch:
            reason = f"a batch of {len(images)} is below the method's minimum of {self.info.min_batch}"
            self.facts = {"updated": False, "reason": reason}
            return self.predict(images).detach()
        if self.effective_batch is not None:
            self.effective_batch.look(images)
        share = None if self.effective_batch is None else self.effective_batch.rule.share(len(images))
        if self.target_statistics is not None:
            self.target_statistics.begin(self.predicting.norm, len(images))
        self.network.norm.adapting = True
        try:
            logits = self.step(images)
        finally:
            self.network.norm.adapting = False
            if self.target_statistics is not None:
                self.target_statistics.end(self.predicting.norm)
        if share is not None:
            self.facts["norm"] = share
        return logits.detach() if logits.requires_grad else logits

    def view(self, images: Tensor, augment: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        """Return a random view of images; its numbers come from the method's own generator."""
        return seeded(augment or self.augment, self.random.fresh_seed())(images)

    def step(self, images: Tensor) -> Tensor:
        """Predict a batch and adapt to it; return the logits."""
        self.facts = {"updated": False, "reason": "this method only predicts"}
        return self.predict(images)

    @torch.no_grad()
    def predict(self, images: Tensor) -> Tensor:
        """Predict a batch and change nothing."""
        return self.network(images).logits


class Term(Stateful):
    """A loss with a memory of its own that can be added to any gradient method's, on the same pass."""

    weight: float = 1.0  # in the sum

    def candidates(self, out: Pass) -> Tensor | None:
        """Return which samples the term may learn from, a mask [n]; None: all."""
        return None

    def __call__(self, out: Pass) -> Objective:
        """Return the term's objective for one pass."""
        raise NotImplementedError

    def restart(self) -> None:
        """Forget what was learned: the network is the source model again."""


class GradientMethod(Method[G]):
    """Predict, compute a loss, step: `steps` times for each batch."""

    settings_class: ClassVar[type[Settings]] = GradientSettings
    commits_last: ClassVar[bool] = True
    batches: int
    share: float  # of the last batch adapted to that the loss might learn from

    def __init__(self, network: Network, settings: G) -> None:
        super().__init__(network, settings)
        self.declare(batches=0, share=1.0)
        self.terms: list[Term] = []
        self.optimizer = self.make_optimizer(self.trained_parameters())

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """A step of its own need not end with the optimizer's, unless its class says so."""
        super().__init_subclass__(**kwargs)
        if ("step" in vars(cls) or "update" in vars(cls)) and "commits_last" not in vars(cls):
            cls.commits_last = False

    def trained_parameters(self) -> dict[str, Parameter]:
        """Return what trains; methods with modules of their own add those."""
        network, s = self.network, self.settings
        chosen = select_parameters(network.module, s.scope, network.classifier_name, s.train_from)
        frozen = getattr(s, "frozen_modules", ())  # of methods that leave the top of a network alone
        return below_top(network.module, chosen, frozen) if frozen else chosen

    def make_optimizer(self, parameters: dict[str, Parameter]) -> NamedOptimizer:
        """Return the optimizer of the settings."""
        s = self.settings
        return NamedOptimizer(parameters, s.optimizer, s.lr, s.weight_decay)

    @property
    def optimizers(self) -> dict[str, NamedOptimizer]:
        """The one optimizer."""
        return {"optimizer": self.optimizer}

    def candidates(self, out: Pass) -> Tensor | None:
        """Return which samples the loss may learn from, a mask [n]; None: all.

        It may use `out.reference` and declared state, and changes nothing.
        """
        return None

    def loss(self, out: Pass) -> Objective:
        """Return what to minimise; the same value whether `out` holds the whole batch or the candidates alone."""
        raise NotImplementedError

    def __call__(self, images: Tensor) -> Tensor:
        """Predict a batch and adapt to it, if it is one of those to adapt to; return the logits."""
        if self.settings.adapt_every > 1:
            self.batches += 1
            if (self.batches - 1) % self.settings.adapt_every:
                self.facts = {"updated": False, "reason": "only some batches are adapted to (setting 'adapt_every')"}
                return self.predict(images).detach()
        return super().__call__(images)

    def step(self, images: Tensor) -> Tensor:
        """Predict, then update, `steps` times. The update comes last: what fails before it has changed no weight."""
        logits = None
        for left in reversed(range(self.settings.steps)):
            with torch.enable_grad():
                out = self.forward(images)
                objective = self.loss(out)
                if left == 0 and self.settings.output == "before":
                    logits = self.answer(images, out.whole)
                self.update(objective, out)
        return self.answer(images, out.whole) if logits is None else logits

    def answer(self, images: Tensor, logits: Tensor) -> Tensor:
        """Return the logits from before the last update, or predict after it, as the settings say."""
        return logits if self.settings.output == "before" else self.predict(images)

    def forward(self, images: Tensor) -> Pass:
        """Return the pass that the loss learns from, with a graph.

        Where samples do not influence each other and few take part, the batch first runs without a graph. Then its
        candidates run again with one: for half a batch that costs less than a graph over all of it.
        """
        s, form = self.settings, self.settings.second_pass
        few = s.train_from is None and self.share <= _FEW[s.scope]  # to repeat frozen layers would be a waste
        wanted = few and images.device.type == "cpu" if form == "auto" else form == "always"
        twice = wanted and self.network.samples_are_independent
        with torch.set_grad_enabled(not twice):
            out = self.network(images)
        chosen = self.candidates(out)
        for term in self.terms:
            more = term.candidates(out)
            chosen = None if chosen is None or more is None else chosen | more
        if not twice:
            return replace(out, candidates=chosen)
        rows = chosen.nonzero().flatten() if chosen is not None else torch.arange(len(images), device=images.device)
        rows = rows if len(rows) else rows.new_zeros(1)  # a loss over no sample still needs a graph
        part = self.network(images[rows])
        part = replace(part, reference=out.reference[rows], whole=out.reference, candidates=chosen)
        return replace(part, maps=out.maps, statistics=out.statistics)

    def with_terms(self, objective: Objective, out: Pass) -> Objective:
        """Return the objective with those of the added terms."""
        for term in self.terms:
            objective = objective + term.weight * term(out)
        return objective

    def update(self, objective: Objective, out: Pass) -> None:
        """Add the terms, take one optimizer step if there is reason to, and record what happened."""
        objective = self.with_terms(objective, out) if self.terms else objective
        finite = objective.value.detach().isfinite()
        should_step = finite if objective.should_step is None else finite & objective.should_step
        if self.settings.min_selected > 0 and objective.selected is not None:
            selected = torch.as_tensor(objective.selected, device=finite.device)
            should_step = should_step & (selected >= self.settings.min_selected)
        share = self.share
        if out.candidates is not None and finite.device.type == "cpu":  # elsewhere nothing asks for it
            share = int(out.candidates.sum()) / len(out.whole)
        facts = {"loss": objective.value.detach(), **objective.facts}
        updated = self.optimizer.step(objective.value, should_step)
        if updated is True:  # a batch that changes nothing changes no state
            self.share = share
        self.facts = {**facts, "updated": updated}
        if updated is False:  # known on the host
            reason = "too few samples to learn from" if self.settings.min_selected > 0 else objective.reason
            reason = "the gradients are not finite" if bool(should_step) else reason
            self.facts["reason"] = reason if bool(finite) else "the loss is not finite"

    def require_source(self, source: Source | None, relative: str) -> Source:
        """Return the source batches, or raise an error that names a method which does without."""
        if source is None:
            raise SettingError(
                f"{self.info.name!r} needs labelled source data: pass source=, a loader (or list) of (images, labels) "
                f"batches or one such pair of tensors; without source data use {relative!r}"
            )
        return source
