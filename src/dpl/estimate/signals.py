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
from dpl.estimate.transport import assigned_probability

__all__ = ["Accuracies", "Signals", "Window", "accuracies", "bounded_probit", "share_of", "source_accuracy"]

_NORMAL = NormalDist()
_RIGHT_ELSEWHERE = 0.25  # of the predictions that differ from those of a source model that is always wrong
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
        parts = (self.source, self.adapted, self.source_firm, self.adapted_firm)
        return Window(*(part[max(0, len(self) - rows) :] for part in parts))

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
    read = read_together(
        shares=torch.stack([window.source_firm, window.adapted_firm, agree]).double().mean(dim=1),
        transport=_transport(logits / home.temperature, home.balance),
        anchor=torch.as_tensor(anchor, dtype=torch.float64),
    )
    firm = [_firmness(share, len(window), home.offset) for share in read["shares"][:2]]
    source, adapted = (min(both) for both in zip(firm, read["transport"], strict=True))
    return Accuracies(min(adapted, *read["anchor"]), source, read["shares"][2])


def _transport(logits: Tensor, balance: Tensor) -> Tensor:
    """Return the transport signal of both models [2] for logits [2, n, C]."""
    p = logits.softmax(dim=2)
    others = p.mean(dim=1).flip(0)  # the other model's mean probabilities
    balances = torch.stack([balance.to(p).expand_as(others), others], dim=1)
    return assigned_probability(p[:, None].expand(-1, 2, -1, -1), balances).amax(dim=1)


def source_accuracy(logits: Tensor, firm: Tensor, home: Signals) -> float:
    """Estimate the source model's accuracy on one window from itself alone."""
    p = (logits.double() / home.temperature).softmax(dim=1)
    of_firm = _firmness(float(firm.double().mean()), len(p), home.offset)
    return min(of_firm, float(assigned_probability(p, home.balance.to(p))))


def _firmness(share: float, rows: int, offset: float) -> float:
    return share_of(bounded_probit(share, rows) + offset)


def _same_scale(adapted: Tensor, source: Tensor, agree: Tensor) -> Tensor:
    """Scale adapted logits to the source model's, by their variance where predictions agree.

    Methods differ in the scale of what they return, and entropy minimisation inflates it.
    """
    own, other = ((x.var(dim=1) * agree).sum() for x in (adapted, source))
    factor = (other / own.clamp(min=1e-12)).sqrt()
    usual = (own <= 0) | (other <= 0) | ((factor < _SAME) & (factor > 1 / _SAME))
    return adapted * torch.where(usual, torch.ones_like(factor), factor)


def bounded_probit(share: float, rows: int) -> float:
    """Return Phi^-1 of a share of so many rows, kept half a row away from 0 and 1."""
    return _NORMAL.inv_cdf(min(max(share, 0.5 / rows), 1 - 0.5 / rows))


def share_of(probits: float) -> float:
    """Return Phi."""
    return _NORMAL.cdf(probits)
