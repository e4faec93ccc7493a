"""What labelled source data show: how accurate, firm and confident the source model is where the answer is known."""

from collections.abc import Callable, Iterable

import torch
import torch.nn.functional as F
from torch import Tensor

from dpl.core.errors import SettingError
from dpl.core.numerics import at_least_float32
from dpl.core.state import Stateful
from dpl.estimate.signals import NORMAL, Signals, bounded_probit, source_accuracy
from dpl.views.shifts import shifted_copies, shrunk

__all__ = ["FEWEST", "Home"]

FEWEST = 50  # labelled images
_TEMPERATURES = torch.logspace(-0.3, 0.7, 51)  # 0.5 to 5: data that a network has learned by heart say nothing
_WINDOWS = 20  # for each kind of shift
_COVERAGE = 0.9
# Error of the estimate for an adapted model, relative to that for the source model under synthetic shifts: the smallest
# share that covers nine of ten windows of the design streams (benchmarks/estimate_study.py).
_ADAPTED_ERROR = 0.42


class Home(Stateful):
    """Facts about the source model on labelled source data, neutral without them; a snapshot has them without data."""

    on_host = True

    rows: int  # labelled images
    accuracy: float
    firmness: float  # share of predictions that survive shrinking
    temperature: float  # divides logits, so that confidence is accuracy on source data
    error: float  # 90 % quantile of the estimate's error, in probits, for windows of `window` rows
    window: int
    balance: Tensor | None  # [C] share of each class

    def __init__(self) -> None:
        super().__init__()
        self.declare(rows=0, accuracy=0.0, firmness=0.0, temperature=1.0, error=0.0, window=0, balance=None)

    def signals(self) -> Signals:
        """Return what the estimate needs of it; there must have been labelled data."""
        offset = bounded_probit(self.accuracy, self.rows) - bounded_probit(self.firmness, self.rows)
        return Signals(offset, self.temperature, self.balance)  # type: ignore[arg-type]

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
        if count < FEWEST:
            raise SettingError(f"calibrate= has {count} labelled images: expected at least {FEWEST}, better 500")
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
        self.rows, self.window = len(labels), max(FEWEST, len(labels) // 2)
        self.accuracy, self.firmness = float(right[0].double().mean()), float(firm[0].double().mean())
        losses = torch.stack([F.cross_entropy(logits[0, 0] / t, labels) for t in _TEMPERATURES])
        self.temperature = float(_TEMPERATURES[losses.argmin()])
        self.balance = torch.bincount(labels, minlength=logits.shape[3]).double() / len(labels)
        generator, signals, errors = torch.Generator().manual_seed(0), self.signals(), []
        for shift in [shift for shift in range(len(logits)) for _ in range(_WINDOWS)]:
            rows = torch.randperm(self.rows, generator=generator)[: self.window]
            estimate = source_accuracy(logits[shift, 0, rows], firm[shift, rows], signals)
            truth = float(right[shift, rows].double().mean())
            errors.append(abs(bounded_probit(estimate, self.window) - bounded_probit(truth, self.window)))
        rank = min(1.0, _COVERAGE * (1 + 1 / len(errors)))
        self.error = float(torch.tensor(errors).quantile(rank))
