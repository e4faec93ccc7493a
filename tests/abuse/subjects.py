"""Every registered method on a tiny network, set up so that a step takes milliseconds; and the score of a stream."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

import dpl
from abuse.streams import Batch, network
from dpl.methods import get_method, list_methods
from nets import network as small_network
from parity.tiny import source_images

# Only what makes a step quick; everything else is the method's default.
QUICK: dict[str, dict[str, Any]] = {
    "adacontrast": {"queue_size": 256},
    "cotta": {"views": 4},
    "foa": {"population": 4},
    "memo": {"views": 2},
    "rmt": {"warmup_samples": 640, "prototype_samples": 640},
}
BATCH_STATISTICS = ["norm", "tent", "eta", "sar", "roid", "cotta", "tsd"]


def methods() -> list[str]:
    """Return the methods that run on the network for digits; FOA puts prompts into a transformer."""
    return [name for name in list_methods() if name != "foa"]


def network_for(name: str) -> nn.Module:
    """Return the network of a method: the one for digits, or a transformer with random weights."""
    return transformer() if name == "foa" else network()


@cache
def transformer() -> nn.Module:
    return small_network("tokens")


def adapted(name: str, guard: Any = True, **settings: Any) -> dpl.AdaptiveModel:
    """Wrap the network of a method."""
    chosen = QUICK.get(name, {}) | settings
    return dpl.adapt(network_for(name), name, source=source_of(name), guard=guard, layout="as_is", **chosen)


def source_of(name: str) -> tuple[Tensor, Tensor] | None:
    """Return the labelled source images that a method is given, None if it needs none."""
    if get_method(name).info.source == "never":
        return None
    images, labels = source_images(torch.float32)
    return images[:320], labels[:320] % network_for(name)(images[:1]).shape[1]


@dataclass
class Score:
    """Right answers to the images that have a label, and what the guard did."""

    right: int = 0
    images: int = 0
    marks: list[tuple[int, int]] = field(default_factory=list)  # (right, images) of each batch

    @property
    def accuracy(self) -> float:
        return 100.0 * self.right / max(1, self.images)

    def add(self, logits: Tensor, labels: Tensor) -> None:
        known = labels >= 0
        right, images = int((logits.argmax(dim=1) == labels)[known].sum()), int(known.sum())
        self.right, self.images = self.right + right, self.images + images
        self.marks.append((right, images))


def run(model: Callable[[Tensor], Tensor], batches: Iterable[Batch], strict: bool = True) -> Score:
    """Feed a stream; every answer has to be finite, unless `strict` is off."""
    score = Score()
    for images, labels in batches:
        logits = model(images)
        assert not strict or torch.isfinite(logits).all(), "an answer is not finite"
        score.add(logits, labels)
    return score


@torch.no_grad()
def source_score(batches: Iterable[Batch]) -> Score:
    """The score of the model as shipped on the same stream (attackers' images do not count)."""
    return run(network(), [(images.clamp(-1e4, 1e4).nan_to_num(), labels) for images, labels in batches])
