"""Look at some batches of a stream with both models, for the estimate of accuracy and for the guard.

A look costs two passes of the frozen source network (images, shrunk images) and one or two of the adapted model
(shrunk images, beside others if images influence each other), paid from a credit that grows with every batch. It reads
nothing on the host: what it finds stays on the model's device until somebody asks.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from dpl.core.numerics import at_least_float32, same_class
from dpl.core.state import Stateful
from dpl.estimate.difference import Comparison, compared
from dpl.estimate.settings import EstimateSettings
from dpl.estimate.signals import Accuracies, Home, Window, accuracies
from dpl.methods.model_state import ModelState
from dpl.methods.parts.norm_rules import UNKNOWN, EarlyBatch, MeasuredShift
from dpl.network.norm_control import install
from dpl.network.split import logits_of, private_copy
from dpl.views.shifts import beside_others, shrunk

__all__ = ["WORSE", "Estimate", "Watch"]

BETTER, WORSE, UNSURE = "better", "worse", "unsure"
_STEP = 3.0  # forward passes that a step costs: forward and backward
_FRESH = 256  # images that are all looked at after a start
_FEWEST = 100  # images without which no verdict is given
_ANCHOR_EVERY = 4  # looks
# The fields of a `Window`.
_WINDOW = ("source_logits", "adapted_logits", "source_firm", "adapted_firm", "adapted_alike", "early_alike")


@dataclass(frozen=True)
class Estimate:
    """Estimated without labels, in percent, from the images looked at last; accuracies need `calibrate=` data."""

    accuracy: float | None = None  # of the adapted model
    low: float | None = None  # 90 % interval of it
    high: float | None = None
    source: float | None = None  # of the unadapted model on the same images
    rows: int = 0  # images looked at
    difference: float | None = None  # adapted minus source, in points
    verdict: str = UNSURE  # is the adapted model "better" or "worse" than the source model, or "unsure"
    # Of the verdict, and why there is no number.
    reason: str = "the stream was not watched; pass calibrate= (labelled source data) or estimate=True to dpl.adapt"

    def as_dict(self) -> dict[str, Any]:
        """Return it as plain data, for records and metrics."""
        return asdict(self)

    def __str__(self) -> str:
        """Return one line for a person."""
        if self.accuracy is None:
            return f"{self.verdict}: {self.reason}"
        which = "unsure which is better" if self.verdict == UNSURE else f"{self.verdict} than the source model"
        return (
            f"{self.accuracy:.1f} % ({self.low:.1f} to {self.high:.1f}), source model {self.source:.1f} %, "
            f"{which}, from {self.rows} images"
        )


class Watch(Stateful):
    """Watches one adapting model; `model.estimate()` asks it."""

    host_reads: ClassVar[int] = 0  # in a step, beside the method's

    home: Home
    source_logits: Tensor | None  # [n, C] of the images looked at last, n at most `window`
    adapted_logits: Tensor | None
    source_firm: Tensor | None  # [n] whether shrinking leaves the prediction
    adapted_firm: Tensor | None
    adapted_alike: Tensor | None  # [n] share of its batch that is predicted as the same class
    early_alike: Tensor | None
    credit: float  # passes of one image that may be spent
    looks: int
    shift: Tensor  # [], of the images looked at last, in running variances
    anchor: Tensor  # [], most that the present weights can have: accuracy at home minus what they lost on the anchors

    def __init__(self, settings: EstimateSettings, model: nn.Module) -> None:
        super().__init__()
        self.settings = settings
        self._source = private_copy(model).eval().requires_grad_(False)
        self._norm = install(self._source)
        self.declare(**dict.fromkeys(_WINDOW), credit=0.0, looks=0)
        self.declare(anchor=torch.ones((), dtype=torch.float64, device=self.device))
        self.declare(shift=torch.full((), UNKNOWN, dtype=torch.float64, device=self.device))
        self.declare_part("home", Home())
        self._anchors: tuple[Tensor, Tensor, int] | None = None  # images, labels, how many the source model has right
        self._found: tuple[Tensor, Accuracies] | None = None  # of these adapted logits
        self._origin = self.state()

    def reset(self) -> None:
        """Forget everything but what labelled source data showed."""
        self.restore(self._origin | {f"home.{key}": value for key, value in self.home.state().items()})

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Set everything to a copy of `state`, on the model's device."""
        super().restore(state)
        super().move(lambda value: value.to(self.device))

    def move(self, transfer: Callable[[Tensor], Tensor]) -> None:
        """Move the source network and the anchors, too."""
        self._source._apply(transfer)  # type: ignore[no-untyped-call]
        kept = self.anchor.to(self.device), self.shift.to(self.device)  # in their own type
        super().move(transfer)
        self.anchor, self.shift = kept
        if self._anchors is not None:
            images, labels, right = self._anchors
            self._anchors = transfer(images), labels.to(self.device), right

    def calibrate(self, batches: Iterable[tuple[Tensor, Tensor]], state: ModelState, measure: bool = True) -> None:
        """Measure the source model on labelled source data (unless a snapshot has that), and keep some as anchors."""
        device = state.network.device
        kept = [(images.to(device), labels.to(device)) for images, labels in batches]
        if measure:
            self.home.measure(self.source, kept)
            self._origin = self.state()
        images, labels = (torch.cat(column)[: self.settings.anchors] for column in zip(*kept, strict=True))
        if len(images):
            self._anchors = images, labels, int((self.source(images).argmax(dim=1) == labels).sum())

    @property
    def device(self) -> torch.device:
        """Where the source network is."""
        return next((value.device for value in self._source.state_dict().values()), torch.device("cpu"))

    @torch.no_grad()
    def source(self, images: Tensor) -> Tensor:
        """Return the logits of the frozen source model."""
        return logits_of(self._source(images))

    @torch.no_grad()
    def early(self, images: Tensor) -> Tensor:
        """Return the logits of the source model with batch statistics in its early layers."""
        with self._norm.using(EarlyBatch()):
            return self.source(images)

    def source_and_shift(self, images: Tensor) -> Tensor:
        """Return the logits of the source model, and measure how far the images lie from the source's."""
        measured = MeasuredShift()
        with self._norm.using(measured):
            logits = self.source(images)
        self.shift = measured.added_to(self.shift, len(images))
        return logits

    def is_due(self, state: ModelState, images: Tensor, *, closely: bool = False, spare: float = 0.0) -> bool:
        """Count a batch; say whether to look at it. `spare` passes of an image may be spent beside the set share."""
        step = _STEP if state.method.optimizers else 1.0
        self.credit += (self.settings.share * step + spare) * len(images)
        due = closely or self.credit >= _price(state, images) or self.rows < _FRESH
        if due:
            self.pay(state, images)
        return due

    def pay(self, state: ModelState, images: Tensor) -> None:
        """Take the price of a look from the credit; a look may cost more than there is."""
        self.credit = max(0.0, self.credit - _price(state, images))

    @torch.no_grad()
    def look(self, state: ModelState, images: Tensor, adapted: Tensor, source: Tensor | None = None) -> None:
        """Add a batch to the window; now and then ask what the weights have lost on the anchors."""
        source = self.source_and_shift(images) if source is None else source
        again = state.method.predict(shrunk(images) if _independent(state) else beside_others(images))[: len(images)]
        pairs = (source, self.source(shrunk(images))), (adapted, again)
        firm = [now.argmax(dim=1) == then.argmax(dim=1) for now, then in pairs]
        seen = (*map(at_least_float32, (source, adapted)), *firm, *self._alike(state, images, adapted))
        for name, value in zip(_WINDOW, seen, strict=True):
            before = getattr(self, name)
            joined = value.detach() if before is None else torch.cat([before, value.detach().to(before)])
            setattr(self, name, joined[-max(self.settings.window, len(value)) :].clone())
        if self._anchors is not None and self.looks % _ANCHOR_EVERY == 0:
            anchors, labels, source_right = self._anchors
            right = (state.method.predict(anchors).argmax(dim=1) == labels).sum()
            self.anchor = (self.home.accuracy + (right - source_right).double() / len(labels)).clamp(max=1.0)
            self.credit -= len(labels)
        self.looks += 1

    def _alike(self, state: ModelState, images: Tensor, adapted: Tensor) -> tuple[Tensor, Tensor]:
        """Return how alike the images of the batch look to the adapted model, and to the early layers' statistics."""
        if _independent(state):
            return (torch.zeros(len(images), device=images.device),) * 2
        return same_class(adapted), same_class(self.early(images))

    def clear(self) -> None:
        """Forget the window: the model was replaced. The shift is the stream's."""
        for name in _WINDOW:
            setattr(self, name, None)
        self.anchor = torch.ones_like(self.anchor)

    @property
    def rows(self) -> int:
        """How many images the window has."""
        return 0 if self.source_logits is None else len(self.source_logits)

    @property
    def window(self) -> Window:
        """The logits of both models for the images looked at last."""
        return Window(*(getattr(self, name) for name in _WINDOW))

    def estimate(self) -> Estimate:
        """Estimate accuracy now."""
        rows = self.rows
        if rows < _FEWEST:
            return Estimate(rows=rows, reason=f"{rows} images were looked at; at least {_FEWEST} are needed")
        if self.home.rows == 0:
            numbers = compared(self.window, rows, rows, self.shift).tolist()
            verdict, reason = self._verdict(Comparison.read(rows, numbers, self.settings).difference)
            reason += "; no percentage without labelled source data (calibrate=)"
            return Estimate(rows=rows, verdict=verdict, reason=reason)
        window = self.window
        if self._found is None or self._found[0] is not window.adapted:
            self._found = window.adapted, accuracies(window, self.home, self.anchor)
        found = self._found[1]
        accuracy, source = found.shown
        low, high = self.home.interval(accuracy, rows)
        verdict, reason = self._verdict(found.difference)
        difference = 100 * (accuracy - source)
        return Estimate(100 * accuracy, 100 * low, 100 * high, 100 * source, rows, difference, verdict, reason)

    def _verdict(self, difference: float) -> tuple[str, str]:
        points = f"an estimated difference of {100 * difference:+.1f} points over {self.rows} images"
        if abs(difference) < self.settings.margin:
            return UNSURE, f"{points} is too small to tell"
        return (BETTER if difference > 0 else WORSE), points


def _price(state: ModelState, images: Tensor) -> float:
    return len(images) * (3.0 if _independent(state) else 5.0)


def _independent(state: ModelState) -> bool:
    """Say whether the prediction for an image is the same in any batch."""
    return state.network.samples_are_independent and not state.method.predicts_jointly
