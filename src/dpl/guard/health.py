"""Is the adapted model losing answers against the frozen source? Estimated without labels, row by row.

Where the two disagree on a row, the source's belief in its own answer over the adapted one, minus the adapted model's
belief in its answer over the source's, estimates what was lost by trusting the adapted one (the *regret*). Two things
deceive confidence and are dealt with apart:

* Entropy minimisers gain confidence by forgetting classes. While the adapted answers cover fewer classes than the
  source's on the same rows (*narrowing*), confidence earns nothing and the loss of entropy counts as loss of answers.
* In a shuffled, diverse stream a method that averages answers (CoTTA) or scores them by cosines (T3A) is merely modest.
  There the regret is also taken at equal logit scale, the milder one counts, and a better balance of classes earns a
  little. In a stream sorted by class or poor in classes neither holds: batch statistics fail there, modestly.
  Fewer classes than the source are no fault there either, as long as both see the same class most.

What exceeds the allowance is summed over rows and never falls below zero (CUSUM): `lost` is an estimate of how many
answers adaptation cost since it last did well. One batch of eight rows can say little; many can.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from dpl.guard.settings import GuardSettings
from dpl.methods.state import Stateful
from dpl.objectives.precision import at_least_float32

__all__ = ["Health", "Signals"]

_SHORT = 32  # rows over which logit scales and the most frequent class are remembered
_PRIOR = 32  # rows of doubt about the balance of classes
_DEAD_ZONE = 0.05  # nats of entropy that differ by chance
_CREDIT = 0.1  # answers that one nat of better balance is worth, in a shuffled stream
_SORTED = 0.2  # how much more often than by chance neighbours agree in a stream sorted by class
_EPS = 1e-12


@dataclass(frozen=True)
class Signals:
    """What one look at some rows of a batch showed."""

    rows: int
    lost: float  # answers lost beyond the allowance, running
    regret: float  # estimated share of answers lost on these rows
    disagreement: float  # share of rows where adapted and source model differ
    confidence: float  # mean confidence of the adapted model minus the source's
    narrowing: float  # nats of entropy of the class balance lost against the source
    classes: float  # effective number of classes of the source's answers, recently
    adapted_classes: float  # the same of the adapted model's
    shuffled: bool  # neither sorted by class nor poor in classes


class Health(Stateful):
    """Running comparison of the adapted model with the source."""

    balance: Tensor | None  # [2, C] answers by class over `memory` rows: source, adapted
    recent: Tensor | None  # [2, C] the same over a few rows
    sums: Tensor  # lost; logit variance of source, of adapted; neighbours that agree, pairs of neighbours
    latest: Tensor | None  # the source's answer for the row looked at last

    def __init__(self, settings: GuardSettings) -> None:
        super().__init__()
        self.settings = settings
        self.declare(balance=None, recent=None, latest=None, sums=torch.zeros(5, dtype=torch.float64))

    @property
    def lost(self) -> float:
        """Answers lost, beyond the allowance."""
        return float(self.sums[0])

    def restart(self) -> None:
        """Forget everything."""
        self.balance = self.recent = self.latest = None
        self.sums = torch.zeros_like(self.sums)

    def move(self, transfer: object) -> None:
        """Stay on the host: everything is read there."""

    def judge(self, source: Tensor, adapted: Tensor) -> Signals:
        """Compare the logits of both models for the same rows [n, C] and remember the result."""
        rows, classes = source.shape
        source, adapted = at_least_float32(source.detach()), at_least_float32(adapted.detach())
        long, short = (1 - 1 / self.settings.memory) ** rows, (1 - 1 / _SHORT) ** rows
        before = torch.zeros(2, classes, dtype=torch.float64)
        spread = torch.stack([source.var(dim=1).sum(), adapted.var(dim=1).sum()])
        spread = self.sums[1:3].to(spread) * short + spread
        facts, answers = _compare(source, adapted, (spread[0] / (spread[1] + _EPS)).sqrt())
        counts = torch.stack([torch.bincount(a, minlength=classes) for a in answers]).double()
        self.balance = (before if self.balance is None else self.balance) * long + counts
        self.recent = (before if self.recent is None else self.recent) * short + counts
        same, pairs = self._neighbours(answers[0])
        self.sums[1:3] = spread.double().cpu()
        self.sums[3:] = self.sums[3:] * long + torch.tensor([same, pairs], dtype=torch.float64)
        return self._conclude(rows, *facts.tolist())

    def _neighbours(self, answers: Tensor) -> tuple[int, int]:
        joined = answers if self.latest is None else torch.cat([self.latest, answers])
        self.latest = answers[-1:].clone()
        return int((joined[1:] == joined[:-1]).sum()), len(joined) - 1

    def _conclude(
        self, rows: int, regret: float, at_equal_scale: float, disagreeing: float, confidence: float
    ) -> Signals:
        assessed = self._assess()
        if assessed.shuffled:
            regret = min(regret, at_equal_scale) - rows * _CREDIT * max(0.0, -assessed.gap)
        if assessed.narrowing > 0:
            regret = max(regret, 0.0)
        regret += rows * assessed.narrowing
        self.sums[0] = max(0.0, self.lost + regret - rows * self.settings.allowance)
        return Signals(
            rows=rows,
            lost=self.lost,
            regret=regret / rows,
            disagreement=disagreeing / rows,
            confidence=confidence / rows,
            narrowing=assessed.narrowing,
            classes=math.exp(assessed.entropies[0]),
            adapted_classes=math.exp(assessed.entropies[1]),
            shuffled=assessed.shuffled,
        )

    def _assess(self) -> "_Balance":
        """Read the balance of classes off the memory."""
        if self.balance is None or self.recent is None:
            raise RuntimeError("no rows were judged yet")
        shares = self.balance / self.balance.sum(dim=1, keepdim=True)
        entropies = [float(h) for h in -(shares * (shares + _EPS).log()).sum(dim=1)]
        seen = float(self.balance[0].sum())
        gap = (entropies[0] - entropies[1]) * seen / (seen + _PRIOR)
        pairs = float(self.sums[4])
        excess = float(self.sums[3]) / max(pairs, 1.0) - float(shares[0].square().sum())
        shuffled = excess * min(1.0, pairs / _PRIOR) < _SORTED and math.exp(entropies[0]) > self._few(seen)
        same_class = int(self.recent[0].argmax()) == int(self.recent[1].argmax())
        narrowing = 0.0 if same_class and not shuffled else max(0.0, gap - _DEAD_ZONE)
        return _Balance(entropies, gap, narrowing, shuffled)

    def _few(self, seen: float) -> float:
        """How many classes are too few, given how many rows were seen."""
        classes = 0 if self.balance is None else self.balance.shape[1]
        return self.settings.min_classes * min(float(classes), seen)

    @property
    def poor(self) -> bool:
        """Say whether both models see too few classes for the stream to teach anything about the others."""
        if self.balance is None:
            return False
        most = max(self._assess().entropies)
        return math.exp(most) < self._few(float(self.balance[0].sum()))


@dataclass(frozen=True)
class _Balance:
    entropies: list[float]  # of the source's answers, of the adapted ones
    gap: float
    narrowing: float
    shuffled: bool


def _compare(source: Tensor, adapted: Tensor, scale: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Return sums over rows (regret, at equal scale, rows that differ, gain of confidence) and both answers."""
    p, own = source.softmax(dim=1).max(dim=1)
    q, other = adapted.softmax(dim=1).max(dim=1)
    believed = p - source.softmax(dim=1).gather(1, other[:, None])[:, 0]
    regrets = [
        believed - (z.softmax(dim=1).gather(1, other[:, None]) - z.softmax(dim=1).gather(1, own[:, None]))[:, 0]
        for z in (adapted, adapted * scale)
    ]
    facts = torch.stack([*regrets, (own != other).to(p.dtype), q - p]).sum(dim=1)
    return facts.double().cpu(), [own.cpu(), other.cpu()]
