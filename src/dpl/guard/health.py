"""Is the adapted model losing answers against the frozen source? Estimated without labels, row by row.

Where the two disagree on a row, the source's belief in its own answer over the adapted one, minus the adapted model's
belief in its answer over the source's, estimates what was lost by trusting the adapted one: the *regret*. Methods
differ in the scale of their logits (RMT adds two networks', CoTTA averages views, T3A takes cosines), so the adapted
logits are first brought to the source's scale, measured where both agree.

Confidence alone deceives: entropy minimisers gain it by forgetting classes. So the balance of classes counts too.

* In a shuffled stream, fewer classes than in the source's answers to the same rows (*narrowing*, in nats of entropy)
  are lost answers, and while that lasts confidence earns nothing; a better balance earns a little.
* In a stream sorted by class or poor in classes it is the other way round: cleaning up a run of one class narrows the
  answers rightly (as long as both models see the same class most, and over many runs no class is lost), and spreading
  them is what batch statistics do when they fail; it costs a little.

A source that a strong shift has broken also answers with few classes, in a stream that has all of them; then spreading
the answers is the cure. Both look alike to the source. They differ in the adapted answers: *distinct* ones are about
as decided as the source's (the margin between first and second answer, in units of the row's own spread, so that no
scale matters) and fall into groups (share of the logits' variance that the answers explain). Distinct answers
that show about all classes, as the rows of a balanced stream would, are put to a last test: if they also survive in
other company (dpl.guard.batch_dependence), they are believed, and the stream is not poor.

Some methods forget a class so slowly that no allowance is exceeded. Over a long time that shows in the balance of
classes alone: the nats lost over all those rows count, beyond what as many differing rows would lose by chance. Methods
that help make the balance better; unless that shows, or hardly an answer differs, every row is looked at.

What exceeds the allowance is summed over rows and never falls below zero (CUSUM): `lost` is an estimate of how many
answers adaptation cost since it last did well. One batch of eight rows can say little; many can.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from dpl.core.state import Stateful
from dpl.guard.measures import added, beliefs, both, confidences, entropies, explained, faded, margins, remaining
from dpl.guard.settings import GuardSettings

__all__ = ["Health", "Signals"]

# Rows over which things are remembered, beside `memory` for the balance of classes.
_RECENT = 32  # the most frequent class
_SCALE = 64  # the scale of the logits (rows on which both models agree)
_LONG = 8  # times `memory`: how often neighbours agree by chance
_SLOW = 32  # times `memory`, also rows not looked at: classes that fade slowly or over many runs
_STRUCTURE = 256  # whether the adapted answers are distinct
_COMPANY = 128  # whether they survive in other company

_PRIOR = 32  # rows of doubt about the balance of classes
_UNEASY = 0.25  # estimated answers lost
_DEAD_ZONE = 0.05  # nats of entropy that differ by chance
_CREDIT = 0.1  # answers that one nat of better balance is worth in a shuffled stream
_DEBIT = 0.08  # answers that one nat of wider spread costs in a sorted or poor one
_SORTED = 0.2  # how much more often than by chance neighbours agree in a stream sorted by class
_RICHER = 1.2
_COMPLETE = 0.97  # of the classes that as many rows of a balanced stream show
_DECIDED = 0.9  # margin against the source's
_GROUPED = 0.45  # share of variance explained; answers to a single class, spread at random, explain 0.4
_TORN, _WHOLE = 0.6, 0.76  # share of answers that survive in other company: artefacts of a batch, recovered answers
_DOUBT = 32  # rows of doubt about that share, to the good
_ODD = 1.0  # about four standard deviations of one row's confidence


@dataclass(frozen=True)
class Signals:
    """What one look at some rows of a batch showed."""

    rows: int
    lost: float  # answers lost beyond the allowance, running
    regret: float  # estimated share of answers lost, narrowing and spread included
    disagreement: float  # share of rows where adapted and source model differ
    confidence: float  # mean confidence of the adapted model minus the source's
    narrowing: float  # nats of entropy of the class balance lost against the source
    classes: float  # effective number of classes of the source's answers, recently
    adapted_classes: float  # the same of the adapted model's
    shuffled: bool  # neither sorted by class nor poor in classes
    distinct: bool  # the adapted answers are decided and fall into groups


class Health(Stateful):
    """Running comparison of the adapted model with the source."""

    balance: Tensor | None  # [2, C] answers by class over `memory` rows: source, adapted
    recent: Tensor | None  # [2, C] the same over a few rows
    long: Tensor | None  # [2, C] the same over a long time
    usual: Tensor | None  # [C] the source's answers over a long time
    latest: Tensor | None  # the source's answer for the row looked at last
    differing: float  # rows on which the answers differ, over a long time
    passed: float  # rows that went by since the last look
    lost: float  # answers lost, beyond the allowance
    ours: float  # logit variance of the source where both agree
    theirs: float  # of the adapted model
    alike: float  # neighbours that got the same answer from the source
    pairs: float  # neighbours
    sure: float  # mean confidence of the adapted model, over the rows of all batches
    peak: float  # mean probability of a batch's most likely class
    rows: float  # those rows
    structure: Tensor  # margins of source, of adapted; variance explained by the adapted answers, of how much
    company: Tensor  # answers that survived in other company, of how many

    def __init__(self, settings: GuardSettings) -> None:
        super().__init__()
        self.settings = settings
        self.declare(balance=None, recent=None, long=None, usual=None, latest=None)
        self.declare(
            lost=0.0,
            differing=0.0,
            passed=0.0,
            ours=0.0,
            theirs=0.0,
            alike=0.0,
            pairs=0.0,
            sure=0.0,
            peak=0.0,
            rows=0.0,
        )
        self.declare(structure=torch.zeros(4, dtype=torch.float64), company=torch.zeros(2, dtype=torch.float64))
        self._seen: _Balance | None = None  # read off the declared values, until they change

    def restart(self) -> None:
        """Forget everything about the adapted model; what is known of the stream stays."""
        self.balance = self.recent = self.long = self._seen = None
        self.lost = self.differing = self.ours = self.theirs = self.sure = self.peak = self.rows = 0.0
        self.structure.zero_()
        self.company.zero_()

    def forgive(self) -> None:
        """Forget the loss alone: the model was put back, the stream is the same."""
        self.lost, self.differing, self.long, self._seen = 0.0, 0.0, None, None

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Set everything to a copy of `state`."""
        super().restore(state)
        self._seen = None

    def move(self, transfer: object) -> None:
        """Stay on the host: everything is read there."""

    def judge(self, source: Tensor, adapted: Tensor, ask: Callable[[], Tensor] | None = None) -> Signals:
        """Compare the logits of both models for the same rows [n, C] and remember the result.

        `ask` tells which of the adapted answers survive in other company; it is called where that decides.
        """
        logits = both(source, adapted)
        answers, spread = logits.argmax(dim=2), logits.var(dim=2, correction=0)
        agree, rows = answers[0] == answers[1], logits.shape[1]
        scaled = logits * torch.tensor([1.0, self._follow_scale(spread, agree)], dtype=logits.dtype)[:, None, None]
        facts = torch.cat([beliefs(scaled, answers), confidences(logits), margins(logits, spread), ~agree[None]])
        ours, theirs, sure, surer, *distances, disagreement = facts.double().mean(dim=1).tolist()
        fresh = [*(rows * distance for distance in distances), *explained(logits[1], answers[1])]
        self.structure = self.structure * remaining(_STRUCTURE, rows) + torch.tensor(fresh, dtype=torch.float64)
        self._count(answers, logits.shape[2])
        self._mind_the_company(rows, ask)
        return self._conclude(rows, ours - self._trust() * theirs, disagreement, surer - sure)

    def _follow_scale(self, spread: Tensor, agree: Tensor) -> float:
        """Return what brings the adapted logits to the source's scale, measured where both agree."""
        ours, theirs, rows = torch.cat([spread * agree, agree[None]]).double().sum(dim=1).tolist()
        decay = remaining(_SCALE, rows)
        self.ours, self.theirs = self.ours * decay + ours, self.theirs * decay + theirs
        return math.sqrt(self.ours / self.theirs) if self.ours > 0 and self.theirs > 0 else 1.0

    def surprised_by(self, adapted: Tensor) -> bool:
        """Say whether the adapted logits of a batch are unlike those before in confidence or in the most likely class.

        It costs nothing but the logits, and tells when to look closely. What was seen is remembered.
        """
        rows, p = len(adapted), adapted.detach().softmax(dim=1)
        sure, peak = torch.stack([p.amax(dim=1).mean(), p.mean(dim=0).amax()]).tolist()
        differs = max(abs(sure - self.sure), abs(peak - self.peak))
        self.passed += rows
        odd = self.rows > 0 and differs > _ODD / math.sqrt(rows) + _DEAD_ZONE
        self.rows = self.rows * remaining(_STRUCTURE, rows) + rows
        self.sure += (sure - self.sure) * rows / self.rows
        self.peak += (peak - self.peak) * rows / self.rows
        return odd

    def watch(self, source: Tensor) -> None:
        """Learn about the stream alone, from the source's logits for consecutive rows."""
        self._follow_stream(source.detach().argmax(dim=1).cpu(), source.shape[1])

    def _count(self, answers: Tensor, classes: int) -> None:
        """Count both models' answers [2, n] by class."""
        counts = torch.stack([torch.bincount(each, minlength=classes) for each in answers]).double()
        self.balance = added(self.balance, counts, remaining(self.settings.memory, answers.shape[1]))
        self.recent = added(self.recent, counts, remaining(_RECENT, answers.shape[1]))
        decay = remaining(_SLOW * self.settings.memory, max(self.passed, answers.shape[1]))
        self.long, self.passed = added(self.long, counts, decay), 0.0
        self.differing = self.differing * decay + int((answers[0] != answers[1]).sum())
        self._follow_stream(answers[0], classes)

    def _follow_stream(self, answers: Tensor, classes: int) -> None:
        """Count the source's answers over a long time, and neighbours that got the same one."""
        rows, memory, self._seen = len(answers), self.settings.memory, None
        counts = torch.bincount(answers, minlength=classes).double()
        self.usual = added(self.usual, counts, remaining(_LONG * memory, rows))
        joined = answers if self.latest is None else torch.cat([self.latest, answers])
        self.latest = answers[-1:].clone()
        decay = remaining(memory, rows)
        self.alike = self.alike * decay + int((joined[1:] == joined[:-1]).sum())
        self.pairs = self.pairs * decay + len(joined) - 1

    def _conclude(self, rows: int, regret: float, disagreement: float, confidence: float) -> Signals:
        seen = self._assess()
        if seen.narrowing > 0:
            regret = max(regret, 0.0) + seen.narrowing
        regret += max(0.0, seen.gain) * (_DEBIT - (_CREDIT + _DEBIT) * self._trust() if seen.shuffled else _DEBIT)
        self.lost = max(0.0, self.lost + rows * (regret - self.settings.allowance))
        return Signals(
            rows=rows,
            lost=max(self.lost, seen.faded[1]),
            regret=regret,
            disagreement=disagreement,
            confidence=confidence,
            narrowing=seen.narrowing,
            classes=seen.classes[0],
            adapted_classes=seen.classes[1],
            shuffled=seen.shuffled,
            distinct=seen.distinct,
        )

    def _mind_the_company(self, rows: int, ask: Callable[[], Tensor] | None) -> None:
        """Put answers that are wider than the source's to the test, as long as little is known of it."""
        self.company *= remaining(_COMPANY, rows)
        if ask is not None and self.enriched and self.company[1] < 0.75 * _COMPANY:
            kept = ask()
            self.company += torch.tensor([int(kept.sum()), len(kept)], dtype=torch.float64)
            self._seen = None

    def _trust(self) -> float:
        """Return how far the adapted answers are the rows' own: 0 for artefacts of the batch, 1 as far as is known."""
        kept, rows = self.company.tolist()
        share: float = (kept + _DOUBT * _WHOLE) / (rows + _DOUBT)
        return min(1.0, max(0.0, (share - _TORN) / (_WHOLE - _TORN)))

    def _assess(self) -> "_Balance":
        """Return the balance of classes."""
        self._seen = self._seen or self._read_balance()
        return self._seen

    def _read_balance(self) -> "_Balance":
        if self.balance is None or self.recent is None or self.usual is None:
            return _Balance([0.0, 0.0], 0.0, 0.0, [0.0, 0.0], False, False, False)
        nats = entropies(self.balance)
        rows = float(self.balance[0].sum())
        gain = (nats[1] - nats[0]) * rows / (rows + _PRIOR)
        few = self.settings.min_classes * min(rows, self.balance.shape[1])
        by_chance = float((self.usual / self.usual.sum()).square().sum())
        excess = (self.alike / max(self.pairs, 1.0) - by_chance) * min(1.0, self.pairs / _PRIOR)
        own, adapted = (math.exp(h) for h in nats)
        distinct = self._distinct()
        complete = adapted >= _COMPLETE / (1 / self.balance.shape[1] + 1 / rows)  # as many as uniform draws show
        poor = own < few and not (distinct and complete and self._trust() > 0.5)
        shuffled = excess < _SORTED and not poor
        same_class = int(self.recent[0].argmax()) == int(self.recent[1].argmax())
        narrowing = max(0.0, -gain - _DEAD_ZONE) if shuffled or not same_class else 0.0
        return _Balance([own, adapted], gain, narrowing, faded(self.long, self.differing), shuffled, poor, distinct)

    def _distinct(self) -> bool:
        """Say whether the adapted answers are about as decided as the source's and fall into groups."""
        ours, theirs, explained, weight = self.structure.tolist()
        return bool(weight > 0 and theirs >= _DECIDED * ours and explained >= _GROUPED * weight)

    @property
    def uneasy(self) -> bool:
        """Say whether anything at all speaks against the adapted model."""
        return self.lost > _UNEASY or self._assess().faded[0] > _UNEASY

    @property
    def shuffled(self) -> bool:
        """Say whether the stream is neither sorted by class nor poor in classes."""
        return self._assess().shuffled

    @property
    def poor(self) -> bool:
        """Say whether the source sees too few classes for the stream to teach anything about the others."""
        return self._assess().poor

    @property
    def enriched(self) -> bool:
        """Say whether the adapted model sees clearly more classes than the source: then the source may be wrong."""
        own, adapted = self._assess().classes
        return adapted > _RICHER * own


@dataclass(frozen=True)
class _Balance:
    classes: list[float]  # effective number of classes: the source's answers, the adapted ones
    gain: float  # nats of entropy that the adapted answers have more, shrunk where few rows were seen
    narrowing: float
    faded: list[float]  # answers lost over a long time with classes that fade: doubtful, certain
    shuffled: bool
    poor: bool
    distinct: bool
