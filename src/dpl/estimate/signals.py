"""Accuracy without labels: the least of three optimists.

Three signals overestimate accuracy, each in another case, so the smallest is the estimate. Phi is the normal
distribution; "home" is labelled source data (dpl.estimate.home).

firmness    Phi(Phi^-1(c) - Phi^-1(c at home) + Phi^-1(accuracy at home)), c the share of predictions that stay when the
            image is shrunk a little; the adapted model sees it beside other images
transport   the mean probability under the best assignment of rows to classes with the expected balance; the larger one
            for two balances: the source data's, and the other model's mean probabilities
anchor      accuracy at home minus what the present weights have lost on labelled source images; adapted model only
"""

from dataclasses import dataclass
from statistics import NormalDist
from typing import NamedTuple

import torch
from torch import Tensor

from dpl.core.numerics import read_together

__all__ = ["NORMAL", "Signals", "Window", "accuracies", "assigned_probability", "bounded_probit", "source_accuracy"]

NORMAL = NormalDist()
_RIGHT_ELSEWHERE = 0.25  # of the predictions that differ from those of a source model that is always wrong
_STEPS = 100  # of the ascent to the best assignment; the result is then within half a point (tests/estimate)
_SAME = 3.0  # logits whose scales differ by less than this factor are taken as they are


class Signals(NamedTuple):
    """What labelled source data say: the offset of firmness in probits, the temperature, the class balance."""

    offset: float
    temperature: float
    balance: Tensor


@dataclass(frozen=True)
class Window:
    """Logits of both models for the same images [n, C], and which predictions are firm [n]."""

    source: Tensor
    adapted: Tensor
    source_firm: Tensor
    adapted_firm: Tensor

    def last(self, rows: int) -> "Window":
        """Return the latest rows."""
        return Window(*(part[-rows:] for part in vars(self).values()))

    def __len__(self) -> int:
        return len(self.source)


class Accuracies(NamedTuple):
    """Estimated accuracies, and the share of rows with equal predictions."""

    adapted: float
    source: float
    agreement: float

    @property
    def difference(self) -> float:
        """Adapted minus source."""
        return self.adapted - self.source

    @property
    def shown(self) -> tuple[float, float]:
        """Adapted and source accuracy, the worse one bounded by what it can have where predictions differ.

        What the source model has right, the adapted one started with: a worse source model is right where both agree.
        A worse adapted model may also be right elsewhere, the more so, the more often the source model is wrong.
        """
        if self.difference >= 0:
            return self.adapted, min(self.source, self.agreement)
        elsewhere = _RIGHT_ELSEWHERE * (1 - self.agreement) * (1 - self.source) ** 2
        return min(self.adapted, self.agreement + elsewhere), self.source


def accuracies(window: Window, home: Signals, anchor: Tensor | float = 1.0) -> Accuracies:
    """Estimate both models' accuracy on one window; `anchor` is the most that the present weights can have."""
    agree = window.source.argmax(dim=1) == window.adapted.argmax(dim=1)
    logits = torch.stack([window.source, _same_scale(window.adapted, window.source, agree)]).double()
    p = (logits / home.temperature).softmax(dim=2)  # [2, n, C]
    others = p.mean(dim=1).flip(0)  # the other model's mean probabilities
    balances = torch.stack([home.balance.to(p).expand_as(others), others], dim=1)
    read = read_together(
        shares=torch.stack([window.source_firm, window.adapted_firm, agree]).double().mean(dim=1),
        transport=assigned_probability(p[:, None].expand(-1, 2, -1, -1), balances).amax(dim=1),
        anchor=torch.as_tensor(anchor, dtype=torch.float64),
    )
    firm = [NORMAL.cdf(bounded_probit(share, len(window)) + home.offset) for share in read["shares"][:2]]
    source, adapted = (min(both) for both in zip(firm, read["transport"], strict=True))
    return Accuracies(min(adapted, *read["anchor"]), source, read["shares"][2])


def source_accuracy(logits: Tensor, firm: Tensor, home: Signals) -> float:
    """Estimate the source model's accuracy on one window from itself alone."""
    p = (logits.double() / home.temperature).softmax(dim=1)
    of_firm = NORMAL.cdf(bounded_probit(float(firm.double().mean()), len(p)) + home.offset)
    return min(of_firm, float(assigned_probability(p, home.balance.to(p))))


def _same_scale(adapted: Tensor, source: Tensor, agree: Tensor) -> Tensor:
    """Scale adapted logits to the source model's where predictions agree: entropy minimisation inflates them."""
    own, other = ((x.var(dim=1) * agree).sum() for x in (adapted, source))
    factor = (other / own.clamp(min=1e-12)).sqrt()
    usual = (own <= 0) | (other <= 0) | ((factor < _SAME) & (factor > 1 / _SAME))
    return adapted * torch.where(usual, torch.ones_like(factor), factor)


def bounded_probit(share: float, rows: int) -> float:
    """Return Phi^-1 of a share of so many rows, kept half a row away from 0 and 1."""
    return NORMAL.inv_cdf(min(max(share, 0.5 / rows), 1 - 0.5 / rows))


def assigned_probability(probabilities: Tensor, balance: Tensor, slack: float = 2.0) -> Tensor:
    """Assign each row [..., n, C] to one class; return the mean probability of the best assignment [...].

    Class k gets n pi_k rows, pi being the `balance` [..., C], within `slack` binomial deviations. A linear program,
    solved in its dual: a price for each class, raised where too many rows want it and lowered where too few do. Every
    price gives an upper bound; the smallest found is returned.
    """
    p, pi = probabilities.double(), balance.double()
    rows = p.shape[-2]
    deviation = slack * (pi * (1 - pi) / rows).sqrt()
    fewest, most = (pi - deviation).clamp(min=0), (pi + deviation).clamp(max=1)
    price, best = torch.zeros_like(pi), torch.full(p.shape[:-2], torch.inf, dtype=p.dtype, device=p.device)
    for step in range(_STEPS):
        value, wanted = (p - price[..., None, :]).max(dim=-1)
        bound = value.mean(dim=-1) + torch.where(price > 0, price * most, price * fewest).sum(dim=-1)
        best = torch.minimum(best, bound)
        share = torch.zeros_like(pi).scatter_add_(-1, wanted, torch.ones_like(value)) / rows
        excess = (share - most).clamp(min=0) - (fewest - share).clamp(min=0)
        slope = torch.where(price > 0, share - most, torch.where(price < 0, share - fewest, excess))
        size = slope.norm(dim=-1, keepdim=True).clamp(min=1e-12)
        price = price + 0.5 / (1 + step) ** 0.75 * slope / size
    return best
