"""`norm="auto"`: the share of batch statistics in BatchNorm, chosen from the stream without a label.

Every candidate share predicts the first few batches, later one batch now and then, and again a few when the images
change (ImageShiftDetector). In between, the source statistics predict some images: if neighbouring images
share their class (ClassOrderStatistics), the share is chosen again. All of it is declared state of the method,
so reset, snapshots and rollbacks include it.

Let p be the predictions of a candidate. I = H(mean p) - mean H(p) is the mutual information between image and class.
It is large if predictions are confident and differ; wrong statistics make them equal or unconfident. The marginal of
one small batch is not that of the stream, so sums are kept over batches. The bias of the plug-in entropy is corrected
to first order.

If a batch has images of one class, its statistics make them look different, and I grows wrongly. So the stream is
tested for its class order. If it is not mixed, only the difference *between* batches counts: H(mean p) minus the mean
over batches of H(batch mean). A run of one class that has not ended yet is not recognised that way. Two rules keep the
source statistics for a while then: the source model is confident of few classes and the smallest share keeps its
predictions, or the information seems to multiply.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from dpl.core.numerics import at_least_float32
from dpl.core.state import Stateful
from dpl.methods.parts.stream_statistics import ClassOrderStatistics, ImageShiftDetector
from dpl.network import Network
from dpl.network.norm import AutoBlend, blend
from dpl.objectives import entropy_of_probabilities

__all__ = ["SHARES", "BlendChoice", "BlendStatistics", "NormChoice"]

SHARES = (0.0, 0.1, 0.25, 0.5, 1.0)

_FEWEST, _MOST = 3, 8  # batches evaluated before the choice is settled ...
_ROWS = 128  # ... and the images that are enough in between
_SELDOM = 48  # batches between two evaluations afterwards
_CHECK_EVERY = 4  # batches between two quick checks; half as many while the stream is new
_EARLY = 16  # batches
_CHECKED = 16  # images of a quick check, or a quarter of the batch
_DECAY = 0.5  # what a later evaluation leaves of the earlier sums

_NEAR = 0.95  # the smallest share with this part of the best one's gain is taken
_LEAST_GAIN = 0.02  # of log C: less than that is no gain
_TOO_GOOD = 3.0  # times the information of the source statistics: early on, that is rather a run of one class
_SURE = 0.9  # confidence of the source model above which a prediction counts as sure
_MOSTLY, _STABLE, _FEW = 0.5, 0.9, 0.4  # sure images, kept predictions, classes: a source model right about few classes
_EPS = 1e-12


class NormChoice(Stateful):
    """Sees each batch before the method does, and sets the share that the network's layers follow."""

    batches: int
    evaluations: int  # batches evaluated since the last (re)start
    rows: int  # images of those
    batches_since_evaluation: int
    is_settled: int
    chosen: int  # index into SHARES
    changes: int  # how often the stream changed
    start: int  # batches before the last change
    is_doubtful: int  # whether a gain was not believed because the stream is new

    def __init__(self, network: Network, rule: AutoBlend) -> None:
        super().__init__()
        self.network, self.rule = network, rule
        self.statistics, self.shift_detector = BlendStatistics(), ImageShiftDetector()
        self.class_order = ClassOrderStatistics()
        self.declare(batches=0, evaluations=0, rows=0, batches_since_evaluation=0)
        self.declare(is_settled=0, chosen=0, changes=0, start=0, is_doubtful=0)
        for name in ("statistics", "shift_detector", "class_order"):
            self.declare_part(name, getattr(self, name))

    @property
    def share(self) -> float:
        """The share of batch statistics."""
        return SHARES[self.chosen]

    def look(self, images: Tensor) -> None:
        """Evaluate or check a batch if it is time, and choose; called before the method sees the batch."""
        self.batches += 1
        self.batches_since_evaluation += 1
        if self.shift_detector.detect(images):
            self.evaluations = self.rows = self.is_settled = 0
            self.changes, self.start = self.changes + 1, self.batches
            self.statistics.decay(0.0)
            self.class_order.restart()
        if not self.is_settled or self.batches_since_evaluation >= _SELDOM:
            self._evaluate(images)
        elif self.batches % (_CHECK_EVERY // 2 if self.is_early else _CHECK_EVERY) == 0:
            self._quick_check(images[: max(_CHECKED, len(images) // 4)])

    def _evaluate(self, images: Tensor) -> None:
        """Predict the batch with every candidate, and choose."""
        if self.is_settled:
            self.statistics.decay(_DECAY)
        logits = self.candidates(images)
        self.statistics.add(logits)
        self.class_order.add(logits[0])
        self.evaluations, self.rows = self.evaluations + 1, self.rows + len(images)
        self.batches_since_evaluation = 0
        enough = self.evaluations >= _FEWEST and self.rows >= _ROWS
        self.is_settled = int(self.evaluations >= _MOST or enough)
        self._choose()

    @torch.no_grad()
    def _quick_check(self, images: Tensor) -> None:
        """Predict some images with the source statistics; choose again if the stream proves to be sorted."""
        with self.network.norm.using(blend(0.0)):
            self.class_order.add(self.network(images).logits)
        no_longer_early = bool(self.is_doubtful) and not self.is_early
        if (self.chosen and not self.is_mixed) or no_longer_early:
            self._choose()

    def _choose(self) -> None:
        choice = self.statistics.choose(self.is_mixed, self.is_early)
        self.is_doubtful = int(choice.doubtful)
        self._apply(choice.chosen)

    @property
    def is_mixed(self) -> bool:
        """Say whether the images of a batch are no more alike than any two images; reads on the host."""
        return self.class_order.is_mixed(self.is_early)

    @property
    def is_early(self) -> bool:
        """Say whether only a few batches were seen since the stream began or changed."""
        return self.batches - self.start < _EARLY

    @torch.no_grad()
    def candidates(self, images: Tensor) -> Tensor:
        """Return the logits of every candidate share [A, B, C]."""
        logits = []
        for share in SHARES:
            with self.network.norm.using(blend(share)):
                logits.append(self.network(images).logits)
        return torch.stack(logits)

    def _apply(self, chosen: int) -> None:
        self.chosen = chosen
        self.rule.share = self.share

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Set everything to a copy of `state`, the share of the layers included."""
        super().restore(state)
        self._apply(self.chosen)


@dataclass(frozen=True)
class BlendChoice:
    """A choice and its reasons."""

    chosen: int  # index into SHARES
    information: tuple[float, ...]  # I of every candidate, in nats
    sure: float  # share of images of which the source model is sure
    stable: float  # share of those whose prediction the smallest share keeps
    classes: float  # effective number of classes in the source model's predictions
    why: str
    doubtful: bool = False  # a gain was not believed


class BlendStatistics(Stateful):
    """Sums over the evaluated images, for every candidate."""

    mass: Tensor | None  # [A, C] sum of p
    square: Tensor | None  # [A, C] sum of p²
    entropy: Tensor | None  # [A, 2] sum of H(p) over images; of H(batch mean), each batch weighted by its size
    counts: Tensor | None  # images, those of which the source model is sure, those of them with a kept prediction

    def __init__(self) -> None:
        super().__init__()
        self._names = ("mass", "square", "entropy", "counts")
        self.declare(**dict.fromkeys(self._names))

    def decay(self, left: float) -> None:
        """Multiply the sums by `left`; 0 forgets them."""
        for name in self._names:
            value = getattr(self, name)
            setattr(self, name, None if value is None or left == 0 else value * left)

    def add(self, logits: Tensor) -> None:
        """Count the logits of all candidates [A, B, C] for one batch."""
        logits = at_least_float32(logits)
        p, rows = logits.softmax(dim=2), logits.shape[1]
        of_batch = entropy_of_probabilities(p.mean(dim=1), _EPS)
        fresh = {
            "mass": p.sum(dim=1),
            "square": p.square().sum(dim=1),
            "entropy": torch.stack([entropy_of_probabilities(p, _EPS).sum(dim=1), of_batch * rows], dim=1),
            "counts": _counts(p),
        }
        for name, value in fresh.items():
            known = getattr(self, name)
            setattr(self, name, value if known is None else known + value)

    def choose(self, mixed: bool, early: bool) -> BlendChoice:
        """Choose a share for a stream that is mixed or sorted by class, and new (`early`) or well known."""
        mass, square, entropy, counts = (getattr(self, name).detach().cpu().double() for name in self._names)
        rows, sure, kept = counts.tolist()
        mean = mass / rows
        bias = ((square / rows - mean.square()).clamp(min=0) / (mean + _EPS)).sum(dim=1) / (2 * rows)
        marginal = entropy_of_probabilities(mean, _EPS)
        information = marginal + bias - entropy[:, 0] / rows
        between = marginal - entropy[:, 1] / rows
        classes = float(entropy_of_probabilities(mean[0], _EPS).exp())
        few = classes < _FEW * min(rows, mean.shape[1])
        facts = (tuple(information.tolist()), sure / rows, kept / max(sure, 1.0), classes)
        if few and sure / rows > _MOSTLY and kept / sure > _STABLE:
            return BlendChoice(0, *facts, "the source model is sure of the few classes it predicts")
        scores = (information if mixed else between).tolist()
        chosen, why = _smallest_near_best(scores, _LEAST_GAIN * math.log(mean.shape[1]))
        if early and mixed and scores[chosen] > _TOO_GOOD * max(scores[0], _EPS):
            return BlendChoice(0, *facts, f"{why}: too large a gain to be believed so early", doubtful=True)
        return BlendChoice(chosen, *facts, why if mixed else f"sorted by class; between batches: {why}")


def _counts(p: Tensor) -> Tensor:
    """Return the images, those of which the source model is sure, those whose prediction the smallest share keeps."""
    confidence, predicted = p[0].max(dim=1)
    sure = confidence > _SURE
    kept = sure & (p[1].argmax(dim=1) == predicted)
    return torch.stack([torch.ones_like(sure).sum(), sure.sum(), kept.sum()]).to(p.dtype)


def _smallest_near_best(scores: list[float], least: float) -> tuple[int, str]:
    """Return the first candidate with nearly all of the best one's gain, or the source statistics if none gains."""
    gain = max(scores) - scores[0]
    if gain < least:
        return 0, f"no share of batch statistics has more information than the source statistics ({scores[0]:.2f} nats)"
    chosen = next(i for i, score in enumerate(scores) if score - scores[0] >= _NEAR * gain)
    return chosen, f"{scores[chosen]:.2f} nats of information, {scores[0]:.2f} with the source statistics"
