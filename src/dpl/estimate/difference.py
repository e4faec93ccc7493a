"""Which of two models is better on the same images, without labels and without calibration.

    difference = firm(adapted) - firm(source) + worth (classes(adapted) - classes(source)) / classes that can be seen

`firm` is the share of predictions that stay when the image is shrunk and others join its batch, `classes` the effective
number of classes predicted, counted over this look and over more images, whichever is worse for the adapted model. A
gain in firm predictions counts by the share of the source model's classes that are left. The difference is at most the
share of predictions that differ. Where nothing has shifted, or where the batch is not mixed and its statistics hide
that, all of these count as lost. docs/internals/guard.md gives the reasons.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dpl.estimate.settings import EstimateSettings
from dpl.estimate.signals import Window
from dpl.methods.parts.norm_rules import BY_CHANCE, FULL_BATCH, UNKNOWN

__all__ = ["Comparison", "compared"]


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
    mixed: bool = True  # whether the classes that the adapted model tells apart are more than its batch statistics show

    @classmethod
    def read(cls, rows: int, numbers: Sequence[float], settings: EstimateSettings) -> "Comparison":
        """Return what `compared` found, once its numbers were read on the host."""
        shift, disagreement, firm, source_firm, alike, early, own, other, seen, own_now, other_now, seen_now = numbers
        left = min(1.0, own / other, own_now / other_now)
        firmer = (firm - source_firm) * (left if firm > source_firm else 1.0)
        found = min((own - other) / seen, (own_now - other_now) / seen_now)
        mixed = early <= settings.alike * alike + BY_CHANCE
        most = disagreement if mixed and shift > settings.least_shift else -disagreement
        difference = max(-disagreement, min(most, firmer + settings.class_worth * found))
        known = None if shift > UNKNOWN / 2 else shift
        return cls(rows, difference, disagreement, firm, source_firm, own, other, known, mixed)


def compared(window: Window, rows: int, memory: int, shift: Tensor) -> Tensor:
    """Compare models on the last `rows` of a window, and classes over `memory` of them; return numbers for `read`."""
    new, old = window.last(rows), window.last(max(rows, memory))
    differ = new.source.argmax(dim=1) != new.adapted.argmax(dim=1)
    shares = [share.double().mean() for share in (differ, new.adapted_firm, new.source_firm)]
    shares += [share.double().mean() for share in (old.adapted_alike, old.early_alike)]
    for part in (old, window.last(max(rows, FULL_BATCH))):
        shares += [_classes(part.adapted), _classes(part.source)]
        shares.append(torch.full_like(shares[-1], min(window.source.shape[1], len(part))))  # classes that can be seen
    return torch.stack([shift.double(), *shares])


def _classes(logits: Tensor) -> Tensor:
    """Return the effective number of classes predicted: the exponential of their entropy."""
    predicted, none = logits.argmax(dim=1), torch.zeros(logits.shape[1], dtype=torch.float64, device=logits.device)
    counts = none.index_add(0, predicted, torch.ones_like(predicted, dtype=torch.float64))
    effective: Tensor = torch.special.entr(counts / len(predicted)).sum().exp()
    return effective
