"""Which of two models is better on the same images, without labels and without calibration.

Two facts are compared. *Firm* predictions stay when an image is shrunk a little and, for the adapted model, when other
images join its batch. Predictions that are artefacts of a batch (one class, few images) are not firm. *Classes* are the
effective number of classes predicted: a collapsing model loses them, a model that recovers from a shift finds them.

    difference = firm(adapted) - firm(source) + worth (classes(adapted) - classes(source)) / classes that can be seen

`worth` is larger for lost classes than for found ones: a batch of one class makes classes appear, too.

A model that always gives the same answer is firm, too. So a gain in firm predictions counts by the share of the source
model's classes that the adapted model still has, with the images before and in this look alone. The difference cannot
exceed the share of images on which the predictions differ: elsewhere nothing is lost or won. Where the images have not
shifted (`MeasuredShift`), the source model is as good as it ever was, and every other prediction counts as lost.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dpl.estimate.settings import EstimateSettings
from dpl.estimate.signals import Window
from dpl.network.norm import UNKNOWN

__all__ = ["Comparing", "Comparison", "begin_comparison", "compare"]


@dataclass(frozen=True)
class Comparison:
    """Adapted and source model on the images of one look; classes are counted over some images before it, too."""

    rows: int  # images compared
    difference: float  # estimated accuracy of the adapted model minus the source model's, as a share
    disagreement: float  # share of images with different predictions
    firm: float  # share of the adapted model's predictions that are firm
    source_firm: float  # the same for the source model
    classes: float  # effective number of classes in the adapted model's predictions
    source_classes: float  # the same for the source model
    shift: float | None  # how far the images lie from the source's, in its variances; None without BatchNorm


@dataclass(frozen=True)
class Comparing:
    """A comparison whose numbers are still on the device, so that a caller can read them together with others."""

    numbers: Tensor  # [8] shift, disagreement, both shares of firm predictions, four effective numbers of classes
    rows: int
    most_classes: int  # that could be seen
    settings: EstimateSettings

    def conclude(self, numbers: Sequence[float]) -> Comparison:
        """Return the comparison; `numbers` were read on the host."""
        shift, disagreement, firm, source_firm, own, other, *now = numbers
        left = min(1.0, own / other, now[0] / now[1])
        firmer = (firm - source_firm) * (left if firm > source_firm else 1.0)
        worth = self.settings.found_classes if own > other else self.settings.lost_classes
        found = firmer + worth * (own - other) / self.most_classes
        most = disagreement if shift > self.settings.least_shift else -disagreement
        found = max(-disagreement, min(most, found))
        return Comparison(
            self.rows, found, disagreement, firm, source_firm, own, other, None if shift > UNKNOWN / 2 else shift
        )


def begin_comparison(window: Window, rows: int, memory: int, shift: Tensor, settings: EstimateSettings) -> Comparing:
    """Compare both models on the last `rows` of a window; count classes over the last `memory` of them."""
    new, old = window.last(rows), window.last(max(rows, memory))
    width = window.source.shape[1]
    differ = new.source.argmax(dim=1) != new.adapted.argmax(dim=1)
    shares = [share.double().mean() for share in (differ, new.adapted_firm, new.source_firm)]
    counted = [_effective(of.argmax(dim=1), width) for of in (old.adapted, old.source, new.adapted, new.source)]
    return Comparing(torch.stack([shift.double(), *shares, *counted]), len(new), min(width, len(old)), settings)


def compare(window: Window, rows: int, memory: int, shift: Tensor, settings: EstimateSettings) -> Comparison:
    """Compare at once."""
    begun = begin_comparison(window, rows, memory, shift, settings)
    return begun.conclude(begun.numbers.tolist())


def _effective(predicted: Tensor, width: int) -> Tensor:
    """Return the exponential of the entropy of predicted classes."""
    shares = torch.zeros(width, dtype=torch.float64, device=predicted.device)
    shares = shares.index_add(0, predicted, torch.ones_like(predicted, dtype=torch.float64)) / len(predicted)
    entropy: Tensor = torch.special.entr(shares).sum()
    return entropy.exp()
