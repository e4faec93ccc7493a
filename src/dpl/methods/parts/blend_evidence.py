"""What is remembered of the candidates of `norm="auto"`, and how it is judged.

Let p be a candidate's predictions. I = H(mean p) - mean H(p), the mutual information between image and answer, is
large where answers are sure and differ; wrong statistics make them alike or unsure. The marginal of one small batch is
not the stream's, so sums are kept over batches, and the plug-in entropy's bias is corrected by its first order.

I alone is fooled where the images of a batch are of one class: its statistics make them look different from each other,
and I grows. So the stream is asked whether it is mixed (parts.stream_order). Where it is not, only what differs
*between* batches counts, H(mean p) - mean over batches of H(batch mean). A run of one class that has not ended yet
cannot be told that way. There a source that is right is sure of its few answers and keeps them under the smallest
share, and of one that is not sure the information seems to multiply: in both cases its statistics stay for a while.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from dpl.core.numerics import at_least_float32
from dpl.core.state import Stateful

__all__ = ["SHARES", "BlendEvidence", "Verdict"]

SHARES = (0.0, 0.1, 0.25, 0.5, 1.0)
_NEAR = 0.95  # the smallest share with this part of the best one's gain is taken
_LEAST_GAIN = 0.02  # of log C: less than that is no gain
_TOO_GOOD = 3.0  # times the information of the source: early on, that is rather a run of one class
_SURE = 0.9  # the source's probability above which its answer counts as sure
_MOSTLY, _STABLE, _FEW = 0.5, 0.9, 0.4  # sure rows, kept answers, classes: a source that is right about few classes
_EPS = 1e-12


@dataclass(frozen=True)
class Verdict:
    """A choice and its reasons."""

    chosen: int  # index into SHARES
    information: tuple[float, ...]  # I of every candidate, in nats
    sure: float  # share of rows of which the source is sure
    stable: float  # share of those whose answer the smallest share keeps
    classes: float  # effective number of classes in the source's answers
    why: str
    doubted: bool = False  # a gain that was not believed

    @property
    def share(self) -> float:
        """The batch's share in the statistics."""
        return SHARES[self.chosen]


class BlendEvidence(Stateful):
    """Sums over the rows that were looked at, for every candidate."""

    mass: Tensor | None  # [A, C] sum of p
    square: Tensor | None  # [A, C] sum of p²
    entropy: Tensor | None  # [A, 2] sum of H(p) over rows; of H(batch mean), each batch counted by its rows
    counts: Tensor | None  # rows, rows of which the source is sure, those whose answer the smallest share keeps

    def __init__(self) -> None:
        super().__init__()
        self._names = ("mass", "square", "entropy", "counts")
        self.declare(**dict.fromkeys(self._names))

    def fade(self, rest: float) -> None:
        """Leave this part of what is known."""
        for name in self._names:
            value = getattr(self, name)
            setattr(self, name, None if value is None or rest == 0 else value * rest)

    def add(self, logits: Tensor) -> None:
        """Take the candidates' logits [A, B, C] for one batch into account."""
        logits = at_least_float32(logits)
        p, rows = logits.softmax(dim=2), logits.shape[1]
        means = p.mean(dim=1)
        fresh = {
            "mass": p.sum(dim=1),
            "square": p.square().sum(dim=1),
            "entropy": torch.stack([_entropy(p).sum(dim=1), _entropy(means) * rows], dim=1),
            "counts": _counts(p),
        }
        for name, value in fresh.items():
            known = getattr(self, name)
            setattr(self, name, value if known is None else known + value)

    def judge(self, mixed: bool, early: bool) -> Verdict:
        """Choose a share for a stream that is mixed or sorted by class, and young (`early`) or well known."""
        mass, square, entropy, counts = self._on_host()
        rows, sure, kept = counts.tolist()
        mean = mass / rows
        bias = ((square / rows - mean.square()).clamp(min=0) / (mean + _EPS)).sum(dim=1) / (2 * rows)
        information = _entropy(mean) + bias - entropy[:, 0] / rows
        between = _entropy(mean) - entropy[:, 1] / rows
        classes = float(_entropy(mean[0]).exp())
        few = classes < _FEW * min(rows, mean.shape[1])
        facts = (tuple(information.tolist()), sure / rows, kept / max(sure, 1.0), classes)
        if few and sure / rows > _MOSTLY and kept / sure > _STABLE:
            return Verdict(0, *facts, "the source is sure of the few classes it sees")
        scores = (information if mixed else between).tolist()
        chosen, why = _smallest_near_best(scores, _LEAST_GAIN * math.log(mean.shape[1]))
        if early and mixed and scores[chosen] > _TOO_GOOD * max(scores[0], _EPS):
            return Verdict(0, *facts, f"{why}: too good to be believed so early", doubted=True)
        return Verdict(chosen, *facts, why if mixed else f"sorted by class; between batches: {why}")

    def _on_host(self) -> list[Tensor]:
        return [getattr(self, name).detach().cpu().double() for name in self._names]


def _entropy(p: Tensor) -> Tensor:
    return -(p * (p + _EPS).log()).sum(dim=-1)


def _counts(p: Tensor) -> Tensor:
    """Return the rows, those of which the source is sure, and those of them whose answer the smallest share keeps."""
    source, answer = p[0].max(dim=1)
    sure = source > _SURE
    kept = sure & (p[1].argmax(dim=1) == answer)
    return torch.stack([torch.ones_like(sure).sum(), sure.sum(), kept.sum()]).to(p.dtype)


def _smallest_near_best(scores: list[float], least: float) -> tuple[int, str]:
    """Return the first candidate with nearly all of the best one's gain over the source (itself without a gain)."""
    gain = max(scores) - scores[0]
    if gain < least:
        return 0, f"no share of the batch's statistics informs more than the source's ({scores[0]:.2f} nats)"
    chosen = next(i for i, score in enumerate(scores) if score - scores[0] >= _NEAR * gain)
    return chosen, f"{scores[chosen]:.2f} nats of information against the source's {scores[0]:.2f}"
