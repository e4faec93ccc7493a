"""AUTO: which statistics, whether to learn, what and how fast, chosen from the stream without a label.

    watch   the source model answers, with the share of batch statistics that informs most (`norm="auto"`)
    trial   a stream that is mixed and shifted: candidates learn in the shadow for a few batches; each is judged on
            every batch before it has learnt from it, against the model that does not learn (dpl.guard.comparison)
    learn   the winner goes on and answers; now and then the model that does not learn is asked again, and where
            learning loses answers it ends
    hold    nothing to learn (the source is sure, the stream is sorted by class, or learning lost): nothing is trained

A stream that looks different from before is watched again from the start. Updates: nothing, affine parameters, or all,
as chosen; `last` says which. Needs: nothing; without BatchNorm the first choice falls away, without a linear classifier
the learning. Labelled source data (`calibrate=`) tell how sure the source is where it is at home.
Output: from before the update. docs/auto.md has the study behind every rule.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.func import functional_call

from dpl.auto.recommendation import Recommendation
from dpl.auto.trial import CANDIDATES, Learner
from dpl.core.errors import ModelError
from dpl.core.numerics import at_least_float32
from dpl.core.optimizer import NamedOptimizer
from dpl.core.settings import setting
from dpl.methods.base import Method, Source
from dpl.methods.parts.blend_evidence import SHARES
from dpl.methods.parts.stream_order import StreamOrder
from dpl.methods.registry import register
from dpl.methods.settings import Settings
from dpl.network import Network
from dpl.network.split import logits_of

__all__ = ["Auto", "AutoSettings"]

WATCH, TRIAL, LEARN, HOLD = range(4)
_NAMES = ("watch", "trial", "learn", "hold")
_WATCHED = 96  # rows that are watched before a decision, in at least three batches
_AT_HOME = 0.9  # mean probability of the answers above which a source is at home; with source data: theirs, less ...
_LESS_SURE = 0.05
_TOLERATED = 0.0  # estimated share of answers lost above which a candidate is no winner
_LOST = 4.0  # estimated answers lost at which learning ends
_STEPS = 64  # confidence thresholds are multiples of 1/64: exact in a snapshot
_LOWEST, _HIGHEST = 0.4, 0.9  # the paper's two values


@dataclass(frozen=True, kw_only=True)
class AutoSettings(Settings, norm="auto"):
    """Settings of the automatic choice; none needs to be touched."""

    trial: int = setting(6, "batches for which candidates learn in the shadow before one is chosen", low=1)
    check: int = setting(8, "batches between two comparisons of the learning model with the still one", low=1)
    patience: int = setting(64, "batches after which a stream that was not worth learning from is watched anew", low=1)


@register(
    "auto",
    paper="this library; docs/auto.md",
    updates="what the stream asks for: statistics, affine parameters, all, or nothing",
    passes="1 forward, and 1 backward where it learns",
)
class Auto(Method[AutoSettings]):
    """Watch, try, learn or hold."""

    settings_class = AutoSettings
    phase: int
    batches: int  # in the present phase
    rows: int
    sure: Tensor | None  # sum of the answers' probabilities over the rows watched
    active: int  # which learner goes on
    threshold: int  # of confidence, in 64ths
    changes: int  # of the stream, that were taken note of
    home_sure: float  # how sure the source is on its own data; 0: not known

    def __init__(self, network: Network, settings: AutoSettings) -> None:
        super().__init__(network, settings)
        rule = network.norm.rule
        self.declare(phase=WATCH, batches=0, rows=0, sure=None, active=0, threshold=0, changes=0, home_sure=0.0)
        self.learners = self._make_learners()
        self.order = StreamOrder()
        self.declare_part("order", self.order)
        network.norm.rule = rule  # the learners follow the same choice
        self.home: dict[str, Tensor] = {}
        for learner in self.learners:
            self.home |= {name: p.detach().clone() for name, p in learner.parameters.items()}
        network.module.requires_grad_(False)

    def _make_learners(self) -> list[Learner]:
        learners = []
        for name in CANDIDATES if self.network.classifier_name is not None else ():
            try:
                learner = Learner(self.network, name)
            except ModelError:  # no affine parameters
                continue
            learner.method.random.generator = self.random.generator
            self.declare_part(f"learner_{name}", learner)
            learners.append(learner)
        return learners

    @property
    def optimizers(self) -> dict[str, NamedOptimizer]:
        """Those of all candidates."""
        return {f"optimizer_{learner.name}": learner.method.optimizer for learner in self.learners}

    def prepare(self, source: Source | None) -> None:
        """Learn from labelled source data how sure the source is where it is at home."""
        total, rows = 0.0, 0
        for images, _ in source or ():
            total += float(_sureness(self.predict(images.to(self.network.device))))
            rows += len(images)
        self.home_sure = round(total / rows * _STEPS) / _STEPS if rows else 0.0

    def step(self, images: Tensor) -> Tensor:
        """Answer, and do what the phase asks for."""
        self._mind_changes()
        self.batches += 1
        if self.phase == LEARN:
            logits = self._learn(images)
        else:
            logits = self.predict(images)
            self.facts = {"updated": False, "reason": f"{_NAMES[self.phase]}: the source's weights answer"}
            {WATCH: self._watch, TRIAL: self._try, HOLD: self._hold}[self.phase](images, logits)
        self.facts |= {"phase": _NAMES[self.phase], "method": self.chosen}
        return logits

    @property
    def chosen(self) -> str:
        """The method that answers now, in the words of `dpl.list_methods()`."""
        if self.phase == LEARN:
            return self.learners[self.active].method_name
        return "norm" if self.norm_choice is not None and self.norm_choice.share else "source"

    def _mind_changes(self) -> None:
        """Watch a changed stream from the start; what is being learnt is compared at once instead."""
        changes = 0 if self.norm_choice is None else self.norm_choice.changes
        if changes != self.changes:
            self.changes = changes
            if self.phase == LEARN:
                self.batches = 0
            else:
                self._enter(WATCH)

    def _enter(self, phase: int) -> None:
        self.phase, self.batches, self.rows, self.sure = phase, 0, 0, None
        self.order.forget()

    def _watch(self, _images: Tensor, logits: Tensor) -> None:
        """Gather what tells whether there is anything to learn."""
        fresh = _sureness(logits)
        self.sure = fresh if self.sure is None else self.sure + fresh
        self.rows += len(logits)
        self.order.add(logits)
        settled = self.norm_choice is None or self.norm_choice.settled
        if self.batches >= 3 and self.rows >= _WATCHED and settled:
            self._enter(TRIAL if self.learners and self.worthwhile() is None else HOLD)

    def worthwhile(self) -> str | None:
        """Return why there is nothing to learn from this stream, or None."""
        if not (self.order.mixed(young=True) if self.norm_choice is None else self.norm_choice.mixed):
            return "the stream is sorted by class"
        if self.norm_choice is not None and self.norm_choice.share > 0:
            return None
        sure = 0.0 if self.sure is None else float(self.sure) / self.rows
        at_home = self.home_sure - _LESS_SURE if self.home_sure else _AT_HOME
        return "the source is as sure as at home" if sure >= at_home else None

    def _try(self, images: Tensor, still: Tensor) -> None:
        """Let every candidate learn from the batch, judged by its answers from before; at the end, choose."""
        if self.batches == 1:
            self._begin_trial(still)
        for learner in self.learners:
            learner.enter()
            logits = learner.method.step(images)
            learner.leave()
            learner.judge(still, logits)
            self._go_home()
        if self.batches >= self.settings.trial:
            self._choose()

    def _begin_trial(self, still: Tensor) -> None:
        """Start all candidates from the source; the threshold is the usual confidence, within the paper's bounds."""
        usual = at_least_float32(still).softmax(dim=1).amax(dim=1).median().clamp(_LOWEST, _HIGHEST)
        self.threshold = math.floor(float(usual) * _STEPS)
        for learner in self.learners:
            learner.restart(self.threshold / _STEPS)

    def _choose(self) -> None:
        """Go on with the candidate that won most answers, if any did not lose some."""
        best = min(range(len(self.learners)), key=lambda i: self.learners[i].mean_regret)
        fine = self.learners[best].mean_regret <= _TOLERATED
        self._enter(LEARN if fine else HOLD)
        if fine:
            self.active = best
            self.learners[best].enter()
        for learner in self.learners:
            learner.kept.clear()

    def _learn(self, images: Tensor) -> Tensor:
        """Let the winner answer and learn; now and then ask the model that does not learn."""
        learner = self.learners[self.active]
        logits = learner.method.step(images)
        self.facts = dict(learner.method.facts)
        if (self.batches - 1) % self.settings.check and learner.comparison.lost < _LOST / 4:
            return logits
        still = self._still(images)
        if learner.judge(still, logits).lost < _LOST:
            return logits
        learner.allow(False)
        self._go_home()
        self._enter(HOLD)
        self.facts = {"updated": False, "reason": "learning lost answers: back to the source's weights"}
        return still

    def _hold(self, images: Tensor, logits: Tensor) -> None:
        """Wait; a stream may become worth learning from."""
        if self.batches >= self.settings.patience:
            self._enter(WATCH)

    @torch.no_grad()
    def _still(self, images: Tensor) -> Tensor:
        """Return the logits of the source's weights, with the statistics chosen."""
        return logits_of(functional_call(self.network.module, self.home, (images,)))

    @torch.no_grad()
    def _go_home(self) -> None:
        """Put the source's weights back into the network."""
        parameters = dict(self.network.module.named_parameters())
        for name, weight in self.home.items():
            parameters[name].copy_(weight)

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Bring everything back: the threshold, and what gradients reach."""
        super().restore(state)
        self.network.module.requires_grad_(False)
        for learner in self.learners if self.threshold else ():
            learner.set_confidence(self.threshold / _STEPS)
        if self.phase == LEARN:
            self.learners[self.active].allow(True)

    def move(self, transfer: Callable[[Tensor], Tensor]) -> None:
        """Take the source's weights along."""
        super().move(transfer)
        self.home = {name: transfer(weight) for name, weight in self.home.items()}

    def recommendation(self) -> Recommendation:
        """Say which method and settings were chosen, as `dpl.adapt` takes them, and why."""
        choice, why, information = self.norm_choice, "statistics: nothing to choose", {}
        if choice is not None and choice.rows:
            verdict = choice.evidence.judge(choice.mixed, choice.young)
            why, information = f"statistics: {verdict.why}", dict(zip(SHARES, verdict.information, strict=True))
        share = 0.0 if choice is None else choice.share
        regret = {learner.name: learner.mean_regret for learner in self.learners if learner.rows}
        if self.phase != LEARN:
            reasons = [why, f"learning: {self._why_not(bool(regret))}"]
            norm = {"norm": share} if share else {}
            return Recommendation("norm" if share else "source", norm, reasons, information, regret)
        learner = self.learners[self.active]
        won = f"learning ({learner.name}): about {-100 * learner.mean_regret:.1f} % of the answers won, unseen"
        values = {**learner.values, "norm": share, "dpl_confidence": self.threshold / _STEPS}
        return Recommendation(learner.method_name, values, [why, won], information, regret)

    def _why_not(self, tried: bool) -> str:
        if not self.learners:
            return "the network has no linear classifier to learn with"
        if tried:
            return "every candidate lost answers to the model that does not learn"
        return self.worthwhile() or "too few images to try it"


def _sureness(logits: Tensor) -> Tensor:
    """Return the sum of the answers' probabilities."""
    return at_least_float32(logits.detach()).softmax(dim=1).amax(dim=1).sum()
