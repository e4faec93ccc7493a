"""What can be read off the logits of two models for the same rows; on the host, where one transfer brings both."""

import math

import torch
from torch import Tensor

from dpl.core.numerics import at_least_float32

__all__ = ["added", "beliefs", "both", "confidences", "entropies", "explained", "faded", "margins", "remaining"]

_EPS = 1e-12
_ENOUGH = 0.005  # share of rows that must differ for a doubt
_DOUBTFUL, _CERTAIN = -1.0, 2.0  # standard deviations of what seems lost over a long time with classes that fade


def both(source: Tensor, adapted: Tensor) -> Tensor:
    """Return the logits of both models side by side [2, n, C] on the host."""
    source, adapted = at_least_float32(source.detach()), at_least_float32(adapted.detach())
    return torch.stack([source, adapted.to(source)]).cpu()


def beliefs(logits: Tensor, answers: Tensor) -> Tensor:
    """Return how much more probable each model's answer is to it than the other's [2, n]."""
    of_both = torch.stack([answers, answers.flip(0)], dim=2)
    own, rival = logits.softmax(dim=2).gather(2, of_both).unbind(dim=2)
    return own - rival


def confidences(logits: Tensor) -> Tensor:
    """Return the probability of each answer [..., n]."""
    return logits.softmax(dim=-1).amax(dim=-1)


def margins(logits: Tensor, spread: Tensor) -> Tensor:
    """Return the distance between first and second answer, in units of the row's spread [2, n]."""
    best = logits.topk(min(2, logits.shape[2]), dim=2).values
    return (best[..., 0] - best[..., -1]) / spread.clamp(min=_EPS).sqrt()


def explained(logits: Tensor, answers: Tensor) -> list[float]:
    """Return how much of the variance of logits [n, C] the answers explain beyond chance, and of how much at most."""
    rows, centred = len(answers), logits - logits.mean(dim=0)
    alike = (answers[:, None] == answers).to(logits.dtype)
    shares = alike / alike.sum(dim=1)  # each row's share in its group
    products = centred @ centred.T
    between, total, groups = torch.stack([(products * shares).sum(), products.trace(), shares.trace()]).tolist()
    share = between / max(total, _EPS)
    return [share * (rows - 1) - (groups - 1), rows - groups]


def entropies(counts: Tensor) -> list[float]:
    """Return the entropy of each row of counts by class, in nats."""
    shares = counts / counts.sum(dim=1, keepdim=True)
    found: list[float] = (-(shares * (shares + _EPS).log()).sum(dim=1)).tolist()
    return found


def faded(long: Tensor | None, differing: float) -> list[float]:
    """Return the nats of entropy lost over all rows of a long time, by two measures of chance: doubtful, certain.

    Rows that merely differ lose nothing on average. It is doubtful unless more than chance was gained, or
    hardly a row differs. Both are 0 until the source has seen half of the classes.
    """
    own, adapted = (0.0, 0.0) if long is None else entropies(long)
    if long is None or math.exp(own) <= long.shape[1] / 2:
        return [0.0, 0.0]
    rows = float(long[0].sum())
    shares = long[0] / rows
    variance = float((shares * (shares + _EPS).log().square()).sum()) - own**2
    lost, deviation = (own - adapted) * rows, math.sqrt(2 * differing * max(0.0, variance))
    doubtful = lost - _DOUBTFUL * deviation if differing > _ENOUGH * rows else 0.0
    return [max(0.0, doubtful), max(0.0, lost - _CERTAIN * deviation)]


def remaining(memory: float, rows: float) -> float:
    """Return what is left of a running sum after so many more rows."""
    return float((1 - 1 / memory) ** rows)


def added(before: Tensor | None, fresh: Tensor, left: float) -> Tensor:
    """Return a running sum of which this much is left, with what is new."""
    return fresh if before is None else before * left + fresh
