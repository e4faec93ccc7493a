"""Accuracy without labels: the least of three optimists.

Three signals overestimate accuracy, each in another case, so the smallest is the estimate. Phi is the normal
distribution; "home" is labelled source data (dpl.estimate.home).

firmness    Phi(Phi^-1(c) - Phi^-1(c at home) + Phi^-1(accuracy at home)), c the share of predictions that stay when the
            image is shrunk a little; the adapted model sees it beside other images
transport   the mean probability under the best assignment of rows to classes with the expected balance; the larger one
            for two balances: the source data's, and the other model's mean probabilities
anchor      accuracy at home minus what the present weights have lost on labelled source images; adapted model only

Without labelled data the first has no offset, the second no temperature and the third is left out. The difference
between the two models is still meaningful then, the level is not.
"""

from dataclasses import dataclass
from statistics import NormalDist
from typing import NamedTuple

import torch
from torch import Tensor

from dpl.estimate.transport import assigned_probability

__all__ = ["Accuracies", "Signals", "Window", "accuracies", "bounded_probit", "share_of", "source_accuracy"]

_NORMAL = NormalDist()


class Signals(NamedTuple):
    """What labelled source data say: the offset of firmness in probits, the temperature, the class balance."""

    offset: float = 0.0
    temperature: float = 1.0
    balance: Tensor | None = None


@dataclass(frozen=True)
class Window:
    """Logits of both models for the same images [n, C], and which predictions are firm [n]."""

    source: Tensor
    adapted: Tensor
    source_firm: Tensor
    adapted_firm: Tensor

    def last(self, rows: int) -> "Window":
        """Return the latest rows."""
        return Window(self.source[-rows:], self.adapted[-rows:], self.source_firm[-rows:], self.adapted_firm[-rows:])

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


def accuracies(window: Window, home: Signals, anchor: float = 1.0) -> Accuracies:
    """Estimate both models' accuracy on one window; `anchor` is the most that the present weights can have."""
    agree = window.source.argmax(dim=1) == window.adapted.argmax(dim=1)
    logits = torch.stack([window.source, _same_scale(window.adapted, window.source, agree)]).double()
    p = (logits / home.temperature).softmax(dim=2)
    expected = torch.full_like(p[0, 0], 1 / p.shape[2]) if home.balance is None else home.balance.to(p)
    means = p.mean(dim=1)
    balances = torch.stack([expected, means[1], expected, means[0]])
    transport = assigned_probability(p.repeat_interleave(2, dim=0), balances).reshape(2, 2).amax(dim=1).tolist()
    firm = torch.stack([window.source_firm, window.adapted_firm]).double().mean(dim=1).tolist()
    source, adapted = (min(_firmness(c, len(window), home), t) for c, t in zip(firm, transport, strict=True))
    return Accuracies(min(adapted, anchor), source, float(agree.double().mean()))


def source_accuracy(logits: Tensor, firm: Tensor, home: Signals) -> float:
    """Estimate the source model's accuracy on one window from itself alone."""
    p = (logits.double() / home.temperature).softmax(dim=1)
    expected = torch.full_like(p[0], 1 / p.shape[1]) if home.balance is None else home.balance.to(p)
    return min(_firmness(float(firm.double().mean()), len(p), home), float(assigned_probability(p, expected)))


def _firmness(share: float, rows: int, home: Signals) -> float:
    return share_of(bounded_probit(share, rows) + home.offset)


def _same_scale(adapted: Tensor, source: Tensor, agree: Tensor) -> Tensor:
    """Scale adapted logits to the source model's, by their variance where predictions agree.

    Methods differ in the scale of what they return, and entropy minimisation inflates it.
    """
    own, other = ((x.var(dim=1) * agree).sum() for x in (adapted, source))
    return adapted * torch.where((own > 0) & (other > 0), (other / own.clamp(min=1e-12)).sqrt(), torch.ones_like(own))


def bounded_probit(share: float, rows: int) -> float:
    """Return Phi^-1 of a share of so many rows, kept half a row away from 0 and 1."""
    return _NORMAL.inv_cdf(min(max(share, 0.5 / rows), 1 - 0.5 / rows))


def share_of(probits: float) -> float:
    """Return Phi."""
    return _NORMAL.cdf(probits)
