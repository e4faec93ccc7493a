"""Accuracy without labels: the least of three optimists.

Three signals overestimate accuracy, each in another case, so the smallest is the estimate. Phi is the normal
distribution; "home" is labelled source data (`Home`).

firmness    Phi(Phi^-1(c) - Phi^-1(c at home) + Phi^-1(accuracy at home)), c the share of predictions that stay when the
            image is shrunk a little; the adapted model sees it beside other images
transport   the mean probability under the best assignment of rows to classes with the expected balance; the larger one
            for two balances: the source data's, and the other model's mean probabilities
anchor      accuracy at home minus what the present weights have lost on labelled source images; adapted model only
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from dpl.core.errors import SettingError
from dpl.core.numerics import at_least_float32, read_together
from dpl.core.state import Stateful
from dpl.views.shifts import shifted_copies, shrunk

__all__ = ["NORMAL", "Home", "Window", "accuracies", "assigned_probability", "bounded_probit", "source_accuracy"]

NORMAL = NormalDist()
_RIGHT_ELSEWHERE = 0.25  # of the predictions that differ from those of a source model that is always wrong
_STEPS = 100  # of the ascent to the best assignment; the result is then within half a point (tests/estimate)
_SAME = 3.0  # logits whose scales differ by less than this factor are taken as they are
_FEWEST = 50  # labelled images that say enough
_TEMPERATURES = torch.logspace(-0.3, 0.7, 51)  # 0.5 to 5: data that a network has learned by heart say nothing
_WINDOWS = 20  # for each kind of shift
_COVERAGE = 0.9
# Error of the estimate for an adapted model, relative to that for the source model under synthetic shifts: the smallest
# share that covers nine of ten windows of the design streams (benchmarks/estimate_study.py).
_ADAPTED_ERROR = 0.42


@dataclass(frozen=True)
class Window:
    """Logits of both models for the same images [n, C], which predictions are firm [n], and how alike batches look."""

    source: Tensor
    adapted: Tensor
    source_firm: Tensor
    adapted_firm: Tensor
    adapted_alike: Tensor  # [n], share of the other images of its batch that are predicted as the same class
    early_alike: Tensor  # [n], the same for the source model with batch statistics in its early layers alone

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


class Home(Stateful):
    """Facts about the source model on labelled source data, neutral without them; a snapshot has them without data."""

    on_host = True

    rows: int  # labelled images
    accuracy: float
    firmness: float  # share of predictions that survive shrinking
    temperature: float  # divides logits, so that confidence is accuracy on source data
    error: float  # 90 % quantile of the estimate's error, in probits, for windows of `window` rows
    window: int
    balance: Any  # [C] share of each class, or None

    def __init__(self) -> None:
        super().__init__()
        self.declare(rows=0, accuracy=0.0, firmness=0.0, temperature=1.0, error=0.0, window=0, balance=None)

    def accuracy_if_firm(self, share: float, rows: int) -> float:
        """Return the accuracy that a share of firm predictions among so many rows stands for."""
        offset = bounded_probit(self.accuracy, self.rows) - bounded_probit(self.firmness, self.rows)
        return NORMAL.cdf(bounded_probit(share, rows) + offset)

    def interval(self, accuracy: float, rows: int) -> tuple[float, float]:
        """Return the 90 % interval: conformal in probits, wider where fewer images were seen than in calibration."""
        middle = bounded_probit(accuracy, rows)
        width = _ADAPTED_ERROR * self.error * max(1.0, (self.window / rows) ** 0.5)
        return min(accuracy, NORMAL.cdf(middle - width)), max(accuracy, NORMAL.cdf(middle + width))

    @torch.no_grad()
    def measure(self, predict: Callable[[Tensor], Tensor], batches: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Predict labelled batches, clean and under synthetic shifts, each also shrunk: ten passes for an image."""
        generator, found, known = torch.Generator().manual_seed(0), [], []
        for images, labels in batches:
            copies = list(shifted_copies(images, generator))
            found.append(torch.stack([torch.stack([predict(x), predict(shrunk(x))]) for x in copies]).cpu())
            known.append(labels.cpu())
        count = sum(map(len, known))
        if count < _FEWEST:
            raise SettingError(f"calibrate= has {count} labelled images: expected at least {_FEWEST}, better 500")
        logits, labels = at_least_float32(torch.cat(found, dim=2)), torch.cat(known)
        if len(labels) != logits.shape[2] or not 0 <= int(labels.min()) <= int(labels.max()) < logits.shape[3]:
            raise SettingError(
                f"calibrate= has {logits.shape[2]} images and {len(labels)} labels from {int(labels.min())} to "
                f"{int(labels.max())}: expected one label from 0 to {logits.shape[3] - 1} for each image"
            )
        self.learn(logits, labels)

    def learn(self, logits: Tensor, labels: Tensor) -> None:
        """Learn from logits [shifts, plain and shrunk, n, C]; the error is of random windows (split conformal)."""
        classes = logits.argmax(dim=3)
        right, firm = classes[:, 0] == labels, classes[:, 0] == classes[:, 1]
        self.rows, self.window = len(labels), max(_FEWEST, len(labels) // 2)
        self.accuracy, self.firmness = float(right[0].double().mean()), float(firm[0].double().mean())
        losses = torch.stack([F.cross_entropy(logits[0, 0] / t, labels) for t in _TEMPERATURES])
        self.temperature = float(_TEMPERATURES[losses.argmin()])
        self.balance = torch.bincount(labels, minlength=logits.shape[3]).double() / len(labels)
        generator, errors = torch.Generator().manual_seed(0), []
        for shift in [shift for shift in range(len(logits)) for _ in range(_WINDOWS)]:
            rows = torch.randperm(self.rows, generator=generator)[: self.window]
            estimate = source_accuracy(logits[shift, 0, rows], firm[shift, rows], self)
            truth = float(right[shift, rows].double().mean())
            errors.append(abs(bounded_probit(estimate, self.window) - bounded_probit(truth, self.window)))
        rank = min(1.0, _COVERAGE * (1 + 1 / len(errors)))
        self.error = float(torch.tensor(errors).quantile(rank))


def accuracies(window: Window, home: Home, anchor: Tensor | float = 1.0) -> Accuracies:
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
    firm = [home.accuracy_if_firm(share, len(window)) for share in read["shares"][:2]]
    source, adapted = (min(both) for both in zip(firm, read["transport"], strict=True))
    return Accuracies(min(adapted, *read["anchor"]), source, read["shares"][2])


def source_accuracy(logits: Tensor, firm: Tensor, home: Home) -> float:
    """Estimate the source model's accuracy on one window from itself alone."""
    p = (logits.double() / home.temperature).softmax(dim=1)
    of_firm = home.accuracy_if_firm(float(firm.double().mean()), len(p))
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
