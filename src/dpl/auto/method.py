"""AUTO: which statistics, whether to learn, what and how fast, chosen from the stream without a label.

    watch   the source model predicts, with the share of batch statistics that has most information (`norm="auto"`)
    trial   the stream is mixed and shifted: candidates adapt to a few batches without serving predictions; each is
            compared with the unadapted model on every batch, before it adapts to it (dpl.guard.comparison)
    learn   the best candidate adapts and predicts; now and then it is compared with the unadapted model again, and
            where adaptation loses predictions it ends
    hold    no reason to adapt (the source model is confident, the stream is sorted by class, or adaptation lost):
            nothing is trained

A stream that changes is watched again from the start. Updates: nothing, affine parameters, or all, as chosen; `last`
reports which. Needs: nothing; without BatchNorm the first choice falls away, without a linear classifier the
learning. Labelled source data (`calibrate=`) measure how confident the source model is on source-domain data.
Output: from before the update. docs/auto.md has the study behind every rule.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call

from dpl.auto.trial import CANDIDATES, TrialMethod
from dpl.core.errors import ModelError
from dpl.core.numerics import at_least_float32
from dpl.core.optimizer import NamedOptimizer
from dpl.core.settings import setting
from dpl.methods.base import Method, Source
from dpl.methods.parts.norm_choice import SHARES
from dpl.methods.parts.stream_statistics import ClassOrderStatistics
from dpl.methods.registry import register
from dpl.methods.settings import Settings
from dpl.network import Network
from dpl.network.split import logits_of

__all__ = ["Auto", "AutoSettings", "Recommendation"]

WATCH, TRIAL, LEARN, HOLD = range(4)
_NAMES = ("watch", "trial", "learn", "hold")
_WATCHED = 96  # images that are watched before a decision, in at least three batches
_UNSHIFTED = 0.9  # mean confidence above which a stream is not shifted; with source data: theirs, less ...
_LESS_CONFIDENT = 0.05
_TOLERATED = 0.0  # estimated share of predictions lost above which a candidate is refused
_LOST = 4.0  # estimated predictions lost at which learning ends
_STEPS = 64  # confidence thresholds are multiples of 1/64: exact in a snapshot
_LOWEST, _HIGHEST = 0.4, 0.9  # the paper's two values


@dataclass(frozen=True, kw_only=True)
class AutoSettings(Settings, norm="auto"):
    """Settings of the automatic choice; none has to be changed."""

    trial: int = setting(6, "batches to which candidates adapt before one is chosen", low=1)
    check: int = setting(8, "batches between two comparisons with the unadapted model", low=1)
    patience: int = setting(64, "batches after which a stream that was not adapted to is watched again", low=1)


@dataclass(frozen=True)
class Recommendation:
    """A method with its settings, as `dpl.adapt` takes them, and the reasons."""

    method: str
    settings: dict[str, Any]
    why: list[str]
    information: dict[float, float] = field(default_factory=dict)  # nats, by the share of batch statistics
    regret: dict[str, float] = field(default_factory=dict)  # estimated share of predictions lost in the trial

    @property
    def call(self) -> str:
        """The line of Python that makes the same choice by hand."""
        arguments = "".join(f", {name}={value!r}" for name, value in self.settings.items())
        return f"dpl.adapt(model, {self.method!r}{arguments})"

    def as_dict(self) -> dict[str, Any]:
        """Return it as plain data."""
        plain = asdict(self)
        plain["information"] = {str(share): nats for share, nats in self.information.items()}
        return plain | {"call": self.call}


@register(
    "auto",
    paper="this library; docs/auto.md",
    updates="as the stream requires: statistics, affine parameters, all, or nothing",
    passes="1 forward, and 1 backward where it learns",
)
class Auto(Method[AutoSettings]):
    """Watch, try, learn or hold."""

    settings_class = AutoSettings
    phase: int
    batches: int  # in the present phase
    rows: int
    confidence_sum: Tensor | None  # over the images watched
    active: int  # index of the candidate that was chosen
    threshold: int  # of confidence, in 64ths
    changes: int  # of the stream, that were handled
    source_confidence: float  # mean confidence of the source model on source-domain data; 0: not known

    def __init__(self, network: Network, settings: AutoSettings) -> None:
        super().__init__(network, settings)
        rule = network.norm.rule
        self.declare(phase=WATCH, batches=0, rows=0, confidence_sum=None, active=0, threshold=0, changes=0)
        self.declare(source_confidence=0.0)
        self.candidates = self._make_candidates()
        self.class_order = ClassOrderStatistics()
        self.declare_part("class_order", self.class_order)
        network.norm.rule = rule  # the candidates follow the same choice
        self.source_weights: dict[str, Tensor] = {}
        for candidate in self.candidates:
            self.source_weights |= {name: p.detach().clone() for name, p in candidate.parameters.items()}
        network.module.requires_grad_(False)

    def _make_candidates(self) -> list[TrialMethod]:
        candidates = []
        for name in CANDIDATES if self.network.classifier_name is not None else ():
            try:
                candidate = TrialMethod(self.network, name)
            except ModelError:  # no affine parameters
                continue
            candidate.method.random.generator = self.random.generator
            self.declare_part(f"candidate_{name}", candidate)
            candidates.append(candidate)
        return candidates

    @property
    def optimizers(self) -> dict[str, NamedOptimizer]:
        """The optimizers of all candidates."""
        return {f"optimizer_{candidate.name}": candidate.method.optimizer for candidate in self.candidates}

    def prepare(self, source: Source | None) -> None:
        """Measure how confident the source model is on source-domain data."""
        total, rows = 0.0, 0
        for images, _ in source or ():
            total += float(_confidence_sum(self.predict(images.to(self.network.device))))
            rows += len(images)
        self.source_confidence = round(total / rows * _STEPS) / _STEPS if rows else 0.0

    def step(self, images: Tensor) -> Tensor:
        """Predict, and do what belongs to the phase."""
        self._handle_change()
        self.batches += 1
        if self.phase == LEARN:
            logits = self._learn(images)
        else:
            logits = self.predict(images)
            self.facts = {"updated": False, "reason": f"{_NAMES[self.phase]}: the source weights predict"}
            {WATCH: self._watch, TRIAL: self._run_trial, HOLD: self._hold}[self.phase](images, logits)
        self.facts |= {"phase": _NAMES[self.phase], "method": self.chosen}
        return logits

    @property
    def chosen(self) -> str:
        """The method that predicts now, by its name in `dpl.list_methods()`."""
        if self.phase == LEARN:
            return self.candidates[self.active].method_name
        return "norm" if self.norm_choice is not None and self.norm_choice.share else "source"

    def _handle_change(self) -> None:
        """Watch a changed stream from the start; while learning, compare at once instead."""
        changes = 0 if self.norm_choice is None else self.norm_choice.changes
        if changes != self.changes:
            self.changes = changes
            if self.phase == LEARN:
                self.batches = 0
            else:
                self._enter(WATCH)

    def _enter(self, phase: int) -> None:
        self.phase, self.batches, self.rows, self.confidence_sum = phase, 0, 0, None
        self.class_order.restart()

    def _watch(self, _images: Tensor, logits: Tensor) -> None:
        """Collect what decides whether to adapt."""
        fresh = _confidence_sum(logits)
        self.confidence_sum = fresh if self.confidence_sum is None else self.confidence_sum + fresh
        self.rows += len(logits)
        self.class_order.add(logits)
        settled = self.norm_choice is None or self.norm_choice.is_settled
        if self.batches >= 3 and self.rows >= _WATCHED and settled:
            self._enter(TRIAL if self.candidates and self.reason_not_to_learn() is None else HOLD)

    def reason_not_to_learn(self) -> str | None:
        """Return why adaptation would not help on this stream, or None."""
        if not (self.class_order.is_mixed(early=True) if self.norm_choice is None else self.norm_choice.is_mixed):
            return "the stream is sorted by class"
        if self.norm_choice is not None and self.norm_choice.share > 0:
            return None
        confidence = 0.0 if self.confidence_sum is None else float(self.confidence_sum) / self.rows
        unshifted = self.source_confidence - _LESS_CONFIDENT if self.source_confidence else _UNSHIFTED
        return "the source model is as confident as on source-domain data" if confidence >= unshifted else None

    def _run_trial(self, images: Tensor, unadapted: Tensor) -> None:
        """Let every candidate adapt to the batch, and compare its logits from before; at the end, choose."""
        if self.batches == 1:
            self._begin_trial(unadapted)
        for candidate in self.candidates:
            candidate.load()
            logits = candidate.method.step(images)
            candidate.unload()
            candidate.compare(unadapted, logits)
            self._restore_source()
        if self.batches >= self.settings.trial:
            self._choose()

    def _begin_trial(self, unadapted: Tensor) -> None:
        """Start all candidates from the source; the threshold is the median confidence, within the paper's bounds."""
        usual = at_least_float32(unadapted).softmax(dim=1).amax(dim=1).median().clamp(_LOWEST, _HIGHEST)
        self.threshold = math.floor(float(usual) * _STEPS)
        for candidate in self.candidates:
            candidate.restart(self.threshold / _STEPS)

    def _choose(self) -> None:
        """Continue with the candidate that lost least, if it lost nothing."""
        best = min(range(len(self.candidates)), key=lambda i: self.candidates[i].mean_regret)
        fine = self.candidates[best].mean_regret <= _TOLERATED
        self._enter(LEARN if fine else HOLD)
        if fine:
            self.active = best
            self.candidates[best].load()
        for candidate in self.candidates:
            candidate.saved_weights.clear()

    def _learn(self, images: Tensor) -> Tensor:
        """Let the chosen candidate predict and adapt; now and then, compare it with the unadapted model."""
        candidate = self.candidates[self.active]
        logits = candidate.method.step(images)
        self.facts = dict(candidate.method.facts)
        if (self.batches - 1) % self.settings.check and candidate.comparison.lost < _LOST / 4:
            return logits
        unadapted = self._frozen_logits(images)
        if candidate.compare(unadapted, logits).lost < _LOST:
            return logits
        candidate.set_trainable(False)
        self._restore_source()
        self._enter(HOLD)
        self.facts = {"updated": False, "reason": "learning lost predictions: back to the source weights"}
        return unadapted

    def _hold(self, images: Tensor, logits: Tensor) -> None:
        """Wait before the stream is watched again."""
        if self.batches >= self.settings.patience:
            self._enter(WATCH)

    @torch.no_grad()
    def _frozen_logits(self, images: Tensor) -> Tensor:
        """Return the logits of the source weights, with the statistics chosen."""
        return logits_of(functional_call(self.network.module, self.source_weights, (images,)))

    @torch.no_grad()
    def _restore_source(self) -> None:
        """Copy the source weights back into the network."""
        parameters = dict(self.network.module.named_parameters())
        for name, weight in self.source_weights.items():
            parameters[name].copy_(weight)

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Set everything to a copy of `state`; the threshold and what is trainable follow from it."""
        super().restore(state)
        self.network.module.requires_grad_(False)
        for candidate in self.candidates if self.threshold else ():
            candidate.set_confidence(self.threshold / _STEPS)
        if self.phase == LEARN:
            self.candidates[self.active].set_trainable(True)

    def move(self, transfer: Callable[[Tensor], Tensor]) -> None:
        """Move the source weights, too."""
        super().move(transfer)
        self.source_weights = {name: transfer(weight) for name, weight in self.source_weights.items()}

    def recommendation(self) -> Recommendation:
        """Return the chosen method and settings, as `dpl.adapt` takes them, with the reasons."""
        choice, why, information = self.norm_choice, "statistics: nothing to choose", {}
        if choice is not None and choice.rows:
            found = choice.statistics.choose(choice.is_mixed, choice.is_early)
            why, information = f"statistics: {found.why}", dict(zip(SHARES, found.information, strict=True))
        share = 0.0 if choice is None else choice.share
        regret = {candidate.name: candidate.mean_regret for candidate in self.candidates if candidate.rows}
        if self.phase != LEARN:
            reasons = [why, f"learning: {self._why_not(bool(regret))}"]
            norm = {"norm": share} if share else {}
            return Recommendation("norm" if share else "source", norm, reasons, information, regret)
        best = self.candidates[self.active]
        won = f"learning ({best.name}): about {-100 * best.mean_regret:.1f} % of the predictions won in the trial"
        values = {**best.values, "norm": share, "dpl_confidence": self.threshold / _STEPS}
        return Recommendation(best.method_name, values, [why, won], information, regret)

    def _why_not(self, tried: bool) -> str:
        if not self.candidates:
            return "the network has no linear classifier to learn with"
        if tried:
            return "every candidate lost predictions against the unadapted model"
        return self.reason_not_to_learn() or "too few images to try it"


def _confidence_sum(logits: Tensor) -> Tensor:
    return at_least_float32(logits.detach()).softmax(dim=1).amax(dim=1).sum()
