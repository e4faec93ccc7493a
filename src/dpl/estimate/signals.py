"""Accuracy without labels: the least of three optimists.

Three signals overestimate accuracy, each in another case, so the smallest is the estimate. Phi is the normal
distribution; "home" is labelled source data (dpl.estimate.home).

firmness    Phi(Phi^-1(c) - Phi^-1(c at home) + Phi^-1(accuracy at home)), c the share of predictions that stay when the
            image is shrunk a little; the adapted model sees it beside other images
transport   the mean probability under the best assignment of rows to classes with the expected balance; the larger one
            for two balances: the source data's, and the other model's mean probabilities
anchor      accuracy at home minus what the present weights have lost on labelled source images; adapted model only

Without labelled data the first has no offset, the third is left out, and the temperature of the second is the one at
which both agree for the adapted model. The difference between the models is still meaningful then, the level is not.
"""

from dataclasses import dataclass
from statistics import NormalDist
from typing import NamedTuple

import torch
from torch import Tensor

from dpl.estimate.transport import assigned_probability

__all__ = ["Accuracies", "Signals", "Window", "accuracies", "bounded_probit", "share_of", "source_accuracy"]

_NORMAL = NormalDist()
_TEMPERATURES = torch.tensor([1.0, 1.2, 1.5, 1.8, 2.2, 2.7, 3.3, 4.0])
_SAME = 3.0  # logits whose scales differ by less than this factor are taken as they are


class Signals(NamedTuple):
    """What labelled source data say: the offset of firmness in probits, the temperature, the class balance."""

    offset: float = 0.0
    temperature: float | None = None  # None: found from the window itself
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

    @property
    def shown(self) -> tuple[float, float]:
        """Adapted and source accuracy; the worse model is right at most about where both agree."""
        if self.difference < 0:
            return min(self.adapted, self.agreement), self.source
        return self.adapted, min(self.source, self.agreement)


def accuracies(window: Window, home: Signals, anchor: float = 1.0) -> Accuracies:
    """Estimate both models' accuracy on one window; `anchor` is the most that the present weights can have."""
    agree = window.source.argmax(dim=1) == window.adapted.argmax(dim=1)
    logits = torch.stack([window.source, _same_scale(window.adapted, window.source, agree)]).double()
    shares = torch.stack([window.source_firm, window.adapted_firm, agree]).double().mean(dim=1).tolist()
    firm = [_firmness(share, len(window), home) for share in shares[:2]]
    if home.temperature is not None:
        transport = _transport(logits, torch.tensor([home.temperature]), home.balance)[0]
    else:  # the temperature at which the adapted model's probabilities are as high as its predictions are firm
        tried = _transport(logits, _TEMPERATURES, home.balance)
        transport = tried[(tried[:, 1] - firm[1]).abs().argmin()]
    source, adapted = (min(both) for both in zip(firm, transport.tolist(), strict=True))
    return Accuracies(min(adapted, anchor), source, shares[2])


def _transport(logits: Tensor, temperatures: Tensor, balance: Tensor | None) -> Tensor:
    """Return the transport signal of both models at each temperature [t, 2] for logits [2, n, C]."""
    p = (logits / temperatures.to(logits)[:, None, None, None]).softmax(dim=3)
    expected = torch.full_like(p[0, 0, 0], 1 / p.shape[3]) if balance is None else balance.to(p)
    others = p.mean(dim=2).flip(1)  # the other model's mean probabilities
    balances = torch.stack([expected.expand_as(others), others], dim=2)
    return assigned_probability(p[:, :, None].expand(-1, -1, 2, -1, -1), balances).amax(dim=2)


def source_accuracy(logits: Tensor, firm: Tensor, home: Signals) -> float:
    """Estimate the source model's accuracy on one window from itself alone."""
    p = (logits.double() / (home.temperature or 1.0)).softmax(dim=1)
    expected = torch.full_like(p[0], 1 / p.shape[1]) if home.balance is None else home.balance.to(p)
    return min(_firmness(float(firm.double().mean()), len(p), home), float(assigned_probability(p, expected)))


def _firmness(share: float, rows: int, home: Signals) -> float:
    return share_of(bounded_probit(share, rows) + home.offset)


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
