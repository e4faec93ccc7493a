"""Compare the adapted model with the frozen source model, without labels.

Where the predictions for an image differ, the *regret* estimates what was lost by adaptation. It is the source model's
preference for its own class over the other one, minus the adapted model's preference for its own. Methods differ in the
scale of their logits (RMT adds two networks, CoTTA averages views, T3A uses cosines). So the adapted logits are first
scaled to those of the source model, by their variance on images with equal predictions.

Confidence alone misleads: entropy minimisation raises it while classes are lost. So the class balance counts, too.

* In an i.i.d. ("shuffled") stream, the *narrowing* counts as lost predictions: the nats of entropy by which the adapted
  model's class balance is below the source model's. While it lasts, confidence earns nothing. A better balance
  earns a little.
* In a stream that is ordered by class or has few classes, the opposite holds. A narrower balance is right there, as
  long as both models predict the same class most often and no class is lost over many runs. A wider
  balance is what failing batch statistics cause; it costs a little.

A source model that a strong shift has broken also predicts few classes, in a stream that has all of them. Then a wider
balance is the repair. The two cases differ in the adapted predictions. *Distinct* ones have about the same margin
between the first and the second class as the source model's, in units of the standard deviation of the image's logits.
They also form groups (the share of the variance of the logits that the predicted classes explain). If distinct
predictions show about all classes, as in a balanced stream, they are tested for batch dependence
(dpl.guard.batch_dependence). If they pass, the stream does not count as one with few classes.

Some methods forget a class so slowly that the allowance is never exceeded. This shows in the class balance over a long
time. The nats lost over all those images count, beyond what as many differing predictions would lose by chance. Unless
the balance has improved, or hardly a prediction differs, every image is compared.

The excess over the allowance is summed over images and never falls below zero (CUSUM). `lost` estimates how many
predictions adaptation has cost since it last did well. One batch of eight images shows little; many batches do.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from dpl.core.numerics import at_least_float32
from dpl.core.state import Stateful
from dpl.guard.settings import GuardSettings
from dpl.objectives import entropy_of_probabilities

__all__ = ["ComparisonResult", "SourceComparison"]

# Images over which running sums are kept, beside the setting `memory` for the class balance.
_RECENT = 32  # the most frequent class
_SCALE = 64  # the scale of the logits (images with equal predictions)
_LONG = 8  # times `memory`: how often neighbours agree by chance
_SLOW = 32  # times `memory`, images that were not compared included: classes lost slowly or over many runs
_STRUCTURE = 256  # whether the adapted predictions are distinct
_STABILITY = 128  # whether they depend on the batch

_PRIOR = 32  # images of doubt about the class balance
_SUSPICIOUS = 0.25  # estimated predictions lost
_DEAD_ZONE = 0.05  # nats of entropy that differ by chance
_CREDIT = 0.1  # predictions that one nat of better balance is worth in a shuffled stream
_DEBIT = 0.08  # predictions that one nat of wider balance costs in the other streams
_ORDERED = 0.2  # excess of agreeing neighbours over chance in a stream ordered by class
_MORE = 1.2  # times the classes of the source model
_COMPLETE = 0.97  # of the classes that as many images of a balanced stream show
_DECIDED = 0.9  # margin relative to the source model's
_GROUPED = 0.45  # share of variance explained; random predictions for a single class explain 0.4
_ARTEFACT, _STABLE = 0.6, 0.76  # share of stable predictions: artefacts of the batch, recovered predictions
_DOUBT = 32  # images of doubt about that share, in favour of the adapted model
_UNUSUAL = 1.0  # about four standard deviations of one image's confidence

_EPS = 1e-12
_ENOUGH = 0.005  # share of predictions that must differ for a doubt
_DOUBTFUL, _CERTAIN = -1.0, 2.0  # standard deviations of what seems lost over a long time


@dataclass(frozen=True)
class ComparisonResult:
    """The signals of one comparison on some images of a batch."""

    rows: int  # images compared
    lost: float  # predictions lost beyond the allowance, running
    regret: float  # estimated share of predictions lost, the class balance included
    disagreement: float  # share of images with different predictions
    confidence: float  # mean confidence of the adapted model minus the source model's
    narrowing: float  # nats of entropy by which the class balance is below the source model's
    classes: float  # effective number of classes in the source model's recent predictions
    adapted_classes: float  # the same for the adapted model
    shuffled: bool  # the stream is neither ordered by class nor has few classes
    distinct: bool  # the adapted predictions are decided and form groups


class SourceComparison(Stateful):
    """Running comparison of the adapted model with the source model."""

    counts: Tensor | None  # [2, C] predictions by class over `memory` images: source model, adapted model
    recent_counts: Tensor | None  # [2, C] the same over a few images
    slow_counts: Tensor | None  # [2, C] the same over a long time
    long_run_counts: Tensor | None  # [C] the source model's predictions over a long time
    last_class: Tensor | None  # the source model's prediction for the image compared last
    differing: float  # images with different predictions, over a long time
    rows_passed: float  # images since the last comparison
    lost: float  # predictions lost, beyond the allowance
    source_spread: float  # variance of the source model's logits where the predictions are equal
    adapted_spread: float  # of the adapted model's
    equal_neighbours: float  # neighbouring images with the same prediction of the source model
    neighbours: float
    confidence: float  # mean confidence of the adapted model, over the images of all batches
    peak: float  # mean probability of a batch's most likely class
    rows: float  # those images
    structure: Tensor  # margins of source and adapted model; variance explained by the adapted predictions, its maximum
    stability: Tensor  # predictions that were stable in a larger batch, predictions tested

    def __init__(self, settings: GuardSettings) -> None:
        super().__init__()
        self.settings = settings
        self.declare(counts=None, recent_counts=None, slow_counts=None, long_run_counts=None, last_class=None)
        self.declare(differing=0.0, rows_passed=0.0, lost=0.0, source_spread=0.0, adapted_spread=0.0)
        self.declare(equal_neighbours=0.0, neighbours=0.0, confidence=0.0, peak=0.0, rows=0.0)
        self.declare(structure=torch.zeros(4, dtype=torch.float64), stability=torch.zeros(2, dtype=torch.float64))
        self._balance: _ClassBalance | None = None  # computed from the declared values, until they change

    def restart(self) -> None:
        """Forget everything about the adapted model; what is known about the stream stays."""
        self.counts = self.recent_counts = self.slow_counts = self._balance = None
        self.lost = self.differing = self.source_spread = self.adapted_spread = 0.0
        self.confidence = self.peak = self.rows = 0.0
        self.structure.zero_()
        self.stability.zero_()

    def clear_loss(self) -> None:
        """Forget only the loss: the model was rolled back, and the stream is the same."""
        self.lost, self.differing, self.slow_counts, self._balance = 0.0, 0.0, None, None

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Set everything to a copy of `state`."""
        super().restore(state)
        self._balance = None

    def move(self, transfer: object) -> None:
        """Stay on the host: everything is read there."""

    def compare(
        self, source: Tensor, adapted: Tensor, test_stability: Callable[[], Tensor] | None = None
    ) -> ComparisonResult:
        """Compare the logits of both models for the same images [n, C] and remember the result.

        `test_stability` returns which adapted predictions are stable in a larger batch; it is called where they decide.
        """
        logits = stack_logits(source, adapted)
        classes, spread = logits.argmax(dim=2), logits.var(dim=2, correction=0)
        agree, rows = classes[0] == classes[1], logits.shape[1]
        scaled = logits * torch.tensor([1.0, self._follow_scale(spread, agree)], dtype=logits.dtype)[:, None, None]
        facts = torch.cat([preferences(scaled, classes), confidences(logits), margins(logits, spread), ~agree[None]])
        own, theirs, sure, surer, *distances, disagreement = facts.double().mean(dim=1).tolist()
        fresh = [*(rows * distance for distance in distances), *explained_variance(logits[1], classes[1])]
        self.structure = self.structure * decay(_STRUCTURE, rows) + torch.tensor(fresh, dtype=torch.float64)
        self._count(classes, logits.shape[2])
        self._test_batch_dependence(rows, test_stability)
        return self._conclude(rows, own - self._reliability() * theirs, disagreement, surer - sure)

    def _follow_scale(self, spread: Tensor, agree: Tensor) -> float:
        """Return the factor that scales the adapted logits to the source model's, measured on equal predictions."""
        source, adapted, rows = torch.cat([spread * agree, agree[None]]).double().sum(dim=1).tolist()
        left = decay(_SCALE, rows)
        self.source_spread = self.source_spread * left + source
        self.adapted_spread = self.adapted_spread * left + adapted
        if self.source_spread > 0 and self.adapted_spread > 0:
            return math.sqrt(self.source_spread / self.adapted_spread)
        return 1.0

    def observe_adapted(self, adapted: Tensor) -> bool:
        """Return whether a batch of adapted logits is unusual in confidence or in its most likely class; remember it.

        It costs nothing but the logits, and indicates when to compare closely.
        """
        rows, p = len(adapted), adapted.detach().softmax(dim=1)
        confidence, peak = torch.stack([p.amax(dim=1).mean(), p.mean(dim=0).amax()]).tolist()
        differs = max(abs(confidence - self.confidence), abs(peak - self.peak))
        self.rows_passed += rows
        unusual = self.rows > 0 and differs > _UNUSUAL / math.sqrt(rows) + _DEAD_ZONE
        self.rows = self.rows * decay(_STRUCTURE, rows) + rows
        self.confidence += (confidence - self.confidence) * rows / self.rows
        self.peak += (peak - self.peak) * rows / self.rows
        return unusual

    def observe_source(self, source: Tensor) -> None:
        """Measure the stream alone, from the source model's logits for consecutive images."""
        self._follow_stream(source.detach().argmax(dim=1).cpu(), source.shape[1])

    def _count(self, predicted: Tensor, classes: int) -> None:
        """Count both models' predictions [2, n] by class."""
        rows = predicted.shape[1]
        counts = torch.stack([torch.bincount(each, minlength=classes) for each in predicted]).double()
        self.counts = running_sum(self.counts, counts, decay(self.settings.memory, rows))
        self.recent_counts = running_sum(self.recent_counts, counts, decay(_RECENT, rows))
        left = decay(_SLOW * self.settings.memory, max(self.rows_passed, rows))
        self.slow_counts, self.rows_passed = running_sum(self.slow_counts, counts, left), 0.0
        self.differing = self.differing * left + int((predicted[0] != predicted[1]).sum())
        self._follow_stream(predicted[0], classes)

    def _follow_stream(self, predicted: Tensor, classes: int) -> None:
        """Count the source model's predictions over a long time, and neighbours with the same one."""
        rows, memory, self._balance = len(predicted), self.settings.memory, None
        counts = torch.bincount(predicted, minlength=classes).double()
        self.long_run_counts = running_sum(self.long_run_counts, counts, decay(_LONG * memory, rows))
        joined = predicted if self.last_class is None else torch.cat([self.last_class, predicted])
        self.last_class = predicted[-1:].clone()
        left = decay(memory, rows)
        self.equal_neighbours = self.equal_neighbours * left + int((joined[1:] == joined[:-1]).sum())
        self.neighbours = self.neighbours * left + len(joined) - 1

    def _conclude(self, rows: int, regret: float, disagreement: float, confidence: float) -> ComparisonResult:
        balance = self.balance
        if balance.narrowing > 0:
            regret = max(regret, 0.0) + balance.narrowing
        worth = _DEBIT - (_CREDIT + _DEBIT) * self._reliability() if balance.shuffled else _DEBIT
        regret += max(0.0, balance.gain) * worth
        self.lost = max(0.0, self.lost + rows * (regret - self.settings.allowance))
        return ComparisonResult(
            rows=rows,
            lost=max(self.lost, balance.slow_loss[1]),
            regret=regret,
            disagreement=disagreement,
            confidence=confidence,
            narrowing=balance.narrowing,
            classes=balance.classes[0],
            adapted_classes=balance.classes[1],
            shuffled=balance.shuffled,
            distinct=balance.distinct,
        )

    def _test_batch_dependence(self, rows: int, test_stability: Callable[[], Tensor] | None) -> None:
        """Test predictions of more classes than the source model's, as long as few were tested."""
        self.stability *= decay(_STABILITY, rows)
        few = self.stability[1] < 0.75 * _STABILITY
        if test_stability is not None and self.adapted_has_more_classes and few:
            stable = test_stability()
            self.stability += torch.tensor([int(stable.sum()), len(stable)], dtype=torch.float64)
            self._balance = None

    def _reliability(self) -> float:
        """Return how reliable the adapted predictions are: 0 for artefacts of the batch, 1 as far as is known."""
        stable, rows = self.stability.tolist()
        share: float = (stable + _DOUBT * _STABLE) / (rows + _DOUBT)
        return min(1.0, max(0.0, (share - _ARTEFACT) / (_STABLE - _ARTEFACT)))

    @property
    def balance(self) -> "_ClassBalance":
        """The class balance of both models."""
        self._balance = self._balance or self._compute_balance()
        return self._balance

    def _compute_balance(self) -> "_ClassBalance":
        if self.counts is None or self.recent_counts is None or self.long_run_counts is None:
            return _ClassBalance([0.0, 0.0], 0.0, 0.0, [0.0, 0.0], False, False, False)
        nats = entropies(self.counts)
        rows = float(self.counts[0].sum())
        gain = (nats[1] - nats[0]) * rows / (rows + _PRIOR)
        few = self.settings.min_classes * min(rows, self.counts.shape[1])
        by_chance = float((self.long_run_counts / self.long_run_counts.sum()).square().sum())
        excess = self.equal_neighbours / max(self.neighbours, 1.0) - by_chance
        excess = excess * min(1.0, self.neighbours / _PRIOR)
        source, adapted = (math.exp(h) for h in nats)
        distinct = self._is_distinct()
        complete = adapted >= _COMPLETE / (1 / self.counts.shape[1] + 1 / rows)  # as many as uniform draws show
        few_classes = source < few and not (distinct and complete and self._reliability() > 0.5)
        shuffled = excess < _ORDERED and not few_classes
        same_class = int(self.recent_counts[0].argmax()) == int(self.recent_counts[1].argmax())
        narrowing = max(0.0, -gain - _DEAD_ZONE) if shuffled or not same_class else 0.0
        slow_loss = slow_class_loss(self.slow_counts, self.differing)
        return _ClassBalance([source, adapted], gain, narrowing, slow_loss, shuffled, few_classes, distinct)

    def _is_distinct(self) -> bool:
        """Say whether the adapted predictions are about as decided as the source model's and form groups."""
        source, adapted, explained, weight = self.structure.tolist()
        return bool(weight > 0 and adapted >= _DECIDED * source and explained >= _GROUPED * weight)

    @property
    def is_suspicious(self) -> bool:
        """Say whether anything at all speaks against the adapted model."""
        return self.lost > _SUSPICIOUS or self.balance.slow_loss[0] > _SUSPICIOUS

    @property
    def is_shuffled(self) -> bool:
        """Say whether the stream is neither ordered by class nor has few classes."""
        return self.balance.shuffled

    @property
    def has_few_classes(self) -> bool:
        """Say whether the stream shows too few classes to adapt to it."""
        return self.balance.few_classes

    @property
    def adapted_has_more_classes(self) -> bool:
        """Say whether the adapted model predicts clearly more classes: then the source model may be wrong."""
        source, adapted = self.balance.classes
        return adapted > _MORE * source


@dataclass(frozen=True)
class _ClassBalance:
    classes: list[float]  # effective number of predicted classes: source model, adapted model
    gain: float  # nats of entropy that the adapted model has more, shrunk where few images were compared
    narrowing: float
    slow_loss: list[float]  # predictions lost over a long time with lost classes: doubtful, certain
    shuffled: bool
    few_classes: bool
    distinct: bool


def stack_logits(source: Tensor, adapted: Tensor) -> Tensor:
    """Return the logits of both models [2, n, C] on the host, in one transfer."""
    source, adapted = at_least_float32(source.detach()), at_least_float32(adapted.detach())
    return torch.stack([source, adapted.to(source)]).cpu()


def preferences(logits: Tensor, classes: Tensor) -> Tensor:
    """Return how much more probable each model's class is to it than the other model's class [2, n]."""
    of_both = torch.stack([classes, classes.flip(0)], dim=2)
    own, other = logits.softmax(dim=2).gather(2, of_both).unbind(dim=2)
    return own - other


def confidences(logits: Tensor) -> Tensor:
    """Return the probability of each prediction [..., n]."""
    return logits.softmax(dim=-1).amax(dim=-1)


def margins(logits: Tensor, spread: Tensor) -> Tensor:
    """Return the margin between first and second class, in standard deviations of the image's logits [2, n]."""
    best = logits.topk(min(2, logits.shape[2]), dim=2).values
    return (best[..., 0] - best[..., -1]) / spread.clamp(min=_EPS).sqrt()


def explained_variance(logits: Tensor, classes: Tensor) -> list[float]:
    """Return the variance of logits [n, C] that the predicted classes explain beyond chance, and its maximum."""
    rows, centred = len(classes), logits - logits.mean(dim=0)
    alike = (classes[:, None] == classes).to(logits.dtype)
    shares = alike / alike.sum(dim=1)  # each row's share in its group
    products = centred @ centred.T
    between, total, groups = torch.stack([(products * shares).sum(), products.trace(), shares.trace()]).tolist()
    share = between / max(total, _EPS)
    return [share * (rows - 1) - (groups - 1), rows - groups]


def entropies(counts: Tensor) -> list[float]:
    """Return the entropy of each row of counts by class, in nats."""
    found: list[float] = entropy_of_probabilities(counts / counts.sum(dim=1, keepdim=True), _EPS).tolist()
    return found


def slow_class_loss(counts: Tensor | None, differing: float) -> list[float]:
    """Return the nats of entropy lost over all images of a long time, by two measures of chance: doubtful, certain.

    Predictions that merely differ lose nothing on average. A loss is doubtful unless more than chance was gained, or
    hardly a prediction differs. Both are 0 until the source model has predicted half of the classes.
    """
    source, adapted = (0.0, 0.0) if counts is None else entropies(counts)
    if counts is None or math.exp(source) <= counts.shape[1] / 2:
        return [0.0, 0.0]
    rows = float(counts[0].sum())
    shares = counts[0] / rows
    variance = float((shares * (shares + _EPS).log().square()).sum()) - source**2
    lost, deviation = (source - adapted) * rows, math.sqrt(2 * differing * max(0.0, variance))
    doubtful = lost - _DOUBTFUL * deviation if differing > _ENOUGH * rows else 0.0
    return [max(0.0, doubtful), max(0.0, lost - _CERTAIN * deviation)]


def decay(memory: float, rows: float) -> float:
    """Return the factor by which a running sum decays over so many images."""
    return float((1 - 1 / memory) ** rows)


def running_sum(before: Tensor | None, fresh: Tensor, left: float) -> Tensor:
    """Return the sum after a decay by the factor `left`, with what is new."""
    return fresh if before is None else before * left + fresh
