"""A sequential test on the estimated difference between the models: bets that pay where one is better.

Each image is worth 1, 0 or -1 answers, and only images with different predictions can be worth anything. For a mean d
and a share v of such images, a bet of size b on "worse by more than the allowance" multiplies its wealth by
exp(b (-d - allowance) - v (e^b - 1 - b)) for each image. If adaptation costs no more than the allowance, the expected
wealth does not grow (Bennett's inequality), so the mean wealth reaches 1/a with a probability of at most a (Ville's
inequality). It restarts at 1, as in CUSUM: then 1/a is the mean number of looks to a false alarm (Lorden). This holds
as far as the estimate of d has no bias.
"""

import math

import torch
from torch import Tensor

from dpl.core.state import Stateful
from dpl.estimate.signals import Accuracies

__all__ = ["EstimateTest", "Evidence"]

_BETS = (0.05, 0.2, 0.6)  # small bets find small differences slowly, large ones large differences at once
_SOME = 0.3  # nats
_DOUBLINGS = 6


class Evidence(Stateful):
    """Log-wealth of bets on one side."""

    wealth: Tensor  # [bets], in nats, never below 0

    def __init__(self, allowance: float, most: float) -> None:
        super().__init__()
        self.allowance, self.most = allowance, most
        self.declare(wealth=torch.zeros(len(_BETS), dtype=torch.float64))

    def add(self, worse: float, disagreement: float, rows: int) -> None:
        """Bet on so many images that are worse by this much on average."""
        bets = torch.tensor(_BETS, dtype=torch.float64)
        risk = max(disagreement, abs(worse), 1 / rows) * (bets.exp() - 1 - bets)
        self.wealth = (self.wealth + rows * (bets * (worse - self.allowance) - risk)).clamp(0, self.most)

    @property
    def nats(self) -> float:
        """The evidence: log of the mean wealth."""
        return float(self.wealth.logsumexp(0)) - math.log(len(_BETS))

    def clear(self) -> None:
        """Forget everything."""
        self.wealth = torch.zeros_like(self.wealth)

    def move(self, transfer: object) -> None:
        """Stay on the host."""


class EstimateTest(Stateful):
    """Whether the estimate shows that the adapted model is worse, or better, than the source model."""

    harm: Evidence
    gain: Evidence

    def __init__(self, allowance: float, false_alarm: float) -> None:
        super().__init__()
        self.alarm = -math.log(false_alarm)
        self.declare_part("harm", Evidence(allowance, 2 * self.alarm))
        self.declare_part("gain", Evidence(0.0, self.alarm * 2 ** (_DOUBLINGS + 1)))

    def add(self, found: Accuracies, rows: int) -> None:
        """Add a look at so many images."""
        self.harm.add(-found.difference, 1 - found.agreement, rows)
        self.gain.add(found.difference, 1 - found.agreement, rows)

    @property
    def is_worse(self) -> bool:
        """Say whether adaptation does harm."""
        return self.harm.nats >= self.alarm

    def shows_gain(self, failures: int) -> bool:
        """Say whether adaptation helps; every failure before doubles the evidence that is needed."""
        doublings = min(max(failures - 1, 0), _DOUBLINGS)
        return self.gain.nats >= self.alarm * float(2**doublings)

    @property
    def is_open(self) -> bool:
        """Say whether some evidence speaks for harm: then every batch should be looked at."""
        return self.harm.nats > _SOME

    def clear(self) -> None:
        """Forget everything."""
        self.harm.clear()
        self.gain.clear()
