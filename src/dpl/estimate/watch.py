"""Look at some batches of a stream with both models, for the estimate of accuracy and for the guard.

A look costs two passes of the frozen source network (images, shrunk images) and one or two of the adapted model
(shrunk images, beside others if images influence each other). Looks are paid from a credit that grows with every
batch, so that on average they take a set share of the time of adaptation. A fresh model is looked at closely.

A look reads nothing on the host: what it finds stays on the model's device until somebody asks.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import ClassVar

import torch
from torch import Tensor, nn

from dpl.core.numerics import at_least_float32
from dpl.core.state import Stateful
from dpl.estimate.difference import Comparing, Comparison, begin_comparison, compare
from dpl.estimate.home import Home
from dpl.estimate.result import BETTER, UNSURE, WORSE, Estimate
from dpl.estimate.settings import EstimateSettings
from dpl.estimate.shifts import beside_others, shrunk
from dpl.estimate.signals import Accuracies, Window, accuracies
from dpl.methods.model_state import ModelState
from dpl.network.norm import UNKNOWN, install
from dpl.network.shift import MeasuredShift
from dpl.network.split import logits_of, private_copy

__all__ = ["Watch"]

_STEP = 3.0  # forward passes that a step costs: forward and backward
_FRESH = 256  # images that are all looked at after a start
_FEWEST = 100  # images without which no verdict is given
_ANCHOR_EVERY = 4  # looks


class Watch(Stateful):
    """Watches one adapting model; `model.estimate()` asks it."""

    host_reads: ClassVar[int] = 0  # in a step, beside the method's

    home: Home
    source_logits: Tensor | None  # [n, C] of the images looked at last, n at most `window`
    adapted_logits: Tensor | None
    source_firm: Tensor | None  # [n] whether shrinking leaves the prediction
    adapted_firm: Tensor | None
    credit: float  # passes of one image that may be spent
    looks: int
    shift: Tensor  # [], of the images looked at last, in running variances
    anchor: Tensor  # [], most that the present weights can have: accuracy at home minus what they lost on the anchors

    def __init__(self, settings: EstimateSettings, model: nn.Module) -> None:
        super().__init__()
        self.settings = settings
        self._source = private_copy(model).eval().requires_grad_(False)
        self._norm = install(self._source)
        self.declare(source_logits=None, adapted_logits=None, source_firm=None, adapted_firm=None)
        self.declare(credit=0.0, looks=0, anchor=torch.ones((), dtype=torch.float64, device=self.device))
        self.declare(shift=torch.full((), UNKNOWN, dtype=torch.float64, device=self.device))
        self.declare_part("home", Home())
        self._anchors: tuple[Tensor, Tensor, int] | None = None  # images, labels, how many the source model has right
        self._found: Accuracies | None = None  # computed from the declared values, until they change
        self._origin = self.state()

    def reset(self) -> None:
        """Forget everything but what labelled source data showed."""
        home = {f"home.{key}": value for key, value in self.home.state().items()}
        self.restore(self._origin | home)

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

    def _is_firm(self, state: ModelState, images: Tensor, predicted: Tensor) -> Tensor:
        """Return which predictions of the adapted model stay when images are shrunk, and other images join them."""
        alone = _independent(state)
        again = state.method.predict(shrunk(images) if alone else beside_others(images))[: len(images)]
        return again.argmax(dim=1) == predicted

    @torch.no_grad()
    def source(self, images: Tensor) -> Tensor:
        """Return the logits of the frozen source model."""
        return logits_of(self._source(images))

    def source_and_shift(self, images: Tensor) -> Tensor:
        """Return the logits of the source model, and measure how far the images lie from the source's."""
        measured = MeasuredShift()
        with self._norm.using(measured):
            logits = self.source(images)
        self.shift = measured.added_to(self.shift, len(images))
        return logits

    def observe(self, state: ModelState, images: Tensor, adapted: Tensor) -> None:
        """Count a batch and look at it if that is due."""
        if self.is_due(state, images):
            self.look(state, images, adapted)

    def is_due(self, state: ModelState, images: Tensor, *, closely: bool = False, spare: float = 0.0) -> bool:
        """Count a batch; say whether to look at it: there is credit, the model is fresh, or `closely`.

        `spare` is what else may be spent on an image, in forward passes.
        """
        step = _STEP if state.method.optimizers else 1.0
        self.credit += (self.settings.share * step + spare) * len(images)
        if not closely and self.credit < _price(state, images) and self.rows >= _FRESH:
            return False
        self.pay(state, images)
        return True

    def pay(self, state: ModelState, images: Tensor) -> None:
        """Take the price of a look from the credit; a look may cost more than there is."""
        self.credit = max(0.0, self.credit - _price(state, images))

    @torch.no_grad()
    def look(self, state: ModelState, images: Tensor, adapted: Tensor, source: Tensor | None = None) -> None:
        """Add a batch to the window."""
        source = self.source_and_shift(images) if source is None else source
        source_firm = source.argmax(dim=1) == self.source(shrunk(images)).argmax(dim=1)
        self._add(source, adapted, source_firm, self._is_firm(state, images, adapted.argmax(dim=1)))
        if self._anchors is not None and self.looks % _ANCHOR_EVERY == 0:
            self._ask_anchors(state)
        self.looks += 1

    def _add(self, source: Tensor, adapted: Tensor, source_firm: Tensor, adapted_firm: Tensor) -> None:
        longest = self.settings.window
        fresh = {"source_logits": at_least_float32(source), "adapted_logits": at_least_float32(adapted)}
        fresh |= {"source_firm": source_firm, "adapted_firm": adapted_firm}
        for name, value in fresh.items():
            before = getattr(self, name)
            joined = value.detach() if before is None else torch.cat([before, value.detach().to(before)])
            setattr(self, name, joined[max(0, len(joined) - max(longest, len(value))) :].clone())
        self._found = None

    def _ask_anchors(self, state: ModelState) -> None:
        images, labels, source_right = self._anchors  # type: ignore[misc]
        right = (state.method.predict(images).argmax(dim=1) == labels).sum()
        self.anchor = (self.home.accuracy + (right - source_right).double() / len(labels)).clamp(max=1.0)
        self.credit -= len(labels)

    @property
    def device(self) -> torch.device:
        """Where the source network is."""
        return next((value.device for value in self._source.state_dict().values()), torch.device("cpu"))

    @property
    def rows(self) -> int:
        """How many images the window has."""
        return 0 if self.source_logits is None else len(self.source_logits)

    def clear(self) -> None:
        """Forget the window: the model was replaced. The shift is the stream's."""
        self.source_logits = self.adapted_logits = self.source_firm = self.adapted_firm = self._found = None
        self.anchor = torch.ones_like(self.anchor)

    @property
    def window(self) -> Window:
        """The logits of both models for the images looked at last."""
        return Window(self.source_logits, self.adapted_logits, self.source_firm, self.adapted_firm)  # type: ignore[arg-type]

    def begin_comparison(self, rows: int, memory: int) -> Comparing:
        """Compare both models on the last rows, and leave the numbers on the device."""
        return begin_comparison(self.window, rows, memory, self.shift, self.settings)

    def compare(self, rows: int, memory: int) -> Comparison:
        """Compare both models on the last rows, without labelled data."""
        return compare(self.window, rows, memory, self.shift, self.settings)

    def accuracies(self) -> Accuracies:
        """Return both estimated accuracies over the window; needs labelled source data."""
        if self._found is None:
            self._found = accuracies(self.window, self.home.signals(), self.anchor)
        return self._found

    def estimate(self) -> Estimate:
        """Estimate accuracy now."""
        if self.rows < _FEWEST:
            reason = f"{self.rows} images were looked at; at least {_FEWEST} are needed"
            return Estimate(None, None, None, None, self.rows, None, UNSURE, reason)
        if not self.home.known:
            verdict, reason = self._verdict(self.compare(self.rows, self.rows).difference)
            reason += "; no percentage without labelled source data (calibrate=)"
            return Estimate(None, None, None, None, self.rows, None, verdict, reason)
        found = self.accuracies()
        verdict, reason = self._verdict(found.difference)
        accuracy, source = found.shown
        low, high = self.home.interval(accuracy, self.rows)
        difference = 100 * (accuracy - source)
        return Estimate(100 * accuracy, 100 * low, 100 * high, 100 * source, self.rows, difference, verdict, reason)

    def _verdict(self, difference: float) -> tuple[str, str]:
        points = f"an estimated difference of {100 * difference:+.1f} points over {self.rows} images"
        if abs(difference) < self.settings.margin:
            return UNSURE, f"{points} is too small to tell"
        return (BETTER if difference > 0 else WORSE), points

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Set everything to a copy of `state`, on the model's device."""
        on_host, device = self.counters(), self.device
        super().restore({key: value if key in on_host else value.to(device) for key, value in state.items()})
        self._found = None

    def move(self, transfer: Callable[[Tensor], Tensor]) -> None:
        """Move the source network and the anchors, too."""
        self._source._apply(transfer)  # type: ignore[no-untyped-call]
        kept = self.anchor.to(self.device), self.shift.to(self.device)  # in their own type
        super().move(transfer)
        self.anchor, self.shift = kept
        if self._anchors is not None:
            images, labels, right = self._anchors
            images = transfer(images)
            self._anchors = images, labels.to(images.device), right
        self._found = None


def _price(state: ModelState, images: Tensor) -> float:
    return len(images) * (3.0 if _independent(state) else 4.0)


def _independent(state: ModelState) -> bool:
    """Say whether the prediction for an image is the same in any batch."""
    return state.network.samples_are_independent and not state.method.predicts_jointly
