"""Streams that break adapting models, drawn from real handwritten digits for the tiny network of tests/parity.

Two shifts: `noise` (pixel noise on the images that the network was trained on; the source model is right on 94 %) and
`shifted` (the traced stream: blur, contrast and noise on held-out digits; 59 %). Every draw has noise of its own.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from parity.tiny import DATA, TinyResNet, source_images, tiny_network

CLASSES = 10
Attack = Callable[[Tensor, Tensor, torch.Generator], Tensor]  # (images, rows, generator) -> the rows' new images
Batch = tuple[Tensor, Tensor]  # images, labels; the label -1 marks an image of an attacker


@dataclass(frozen=True)
class Shift:
    """A pool of labelled images and the strength of the noise added at each draw."""

    images: Tensor
    labels: Tensor
    noise: float

    def draw(self, classes: Tensor, generator: torch.Generator) -> Batch:
        """Draw one image for each wanted class."""
        order = self.labels.argsort(stable=True)
        counts = torch.bincount(self.labels, minlength=CLASSES)
        start = counts.cumsum(0) - counts
        pick = (torch.rand(len(classes), generator=generator) * counts[classes]).long()
        rows = order[start[classes] + pick]
        images = self.images[rows]
        return (images + self.noise * torch.randn(images.shape, generator=generator)).clamp(0, 1), classes


@cache
def network() -> TinyResNet:
    return tiny_network(torch.float32)


@cache
def shift(name: str) -> Shift:
    if name == "shifted":
        with np.load(DATA / "stream.npz", allow_pickle=False) as file:
            images, labels = torch.from_numpy(file["images"]).float(), torch.from_numpy(file["labels"]).long()
        return Shift(images.flatten(0, 1), labels.flatten(), 0.03)
    images, labels = source_images(torch.float32)
    return Shift(images, labels, {"noise": 0.25, "easy": 0.02}[name])


def cut(images: Tensor, labels: Tensor, size: int) -> list[Batch]:
    return list(zip(images.split(size), labels.split(size), strict=True))


def uniform(count: int, generator: torch.Generator) -> Tensor:
    return torch.randint(CLASSES, (count,), generator=generator)


def iid(name: str, images: int, size: int = 32, seed: int = 0) -> list[Batch]:
    """Shuffled classes."""
    g = torch.Generator().manual_seed(seed)
    return cut(*shift(name).draw(uniform(images, g), g), size)


def correlated(name: str, images: int, size: int = 32, seed: int = 0) -> list[Batch]:
    """Sorted by class: each class once, in one run."""
    g = torch.Generator().manual_seed(seed)
    classes = torch.randperm(CLASSES, generator=g).repeat_interleave(-(-images // CLASSES))[:images]
    return cut(*shift(name).draw(classes, g), size)


def runs(name: str, images: int, size: int = 32, seed: int = 0) -> list[Batch]:
    """Short runs of one class, 5 to 80 images each."""
    g = torch.Generator().manual_seed(seed)
    lengths = torch.randint(5, 81, (images // 5 + 1,), generator=g)
    classes = uniform(len(lengths), g).repeat_interleave(lengths)[:images]
    return cut(*shift(name).draw(classes, g), size)


def recurring(visits: int, images: int, size: int = 32, seed: int = 0) -> list[list[Batch]]:
    """Two shifts and clean images in turn, `visits` times; one list of batches for each visit to all three."""
    names = ("noise", "shifted", "easy")
    return [
        [batch for k, name in enumerate(names) for batch in iid(name, images, size, seed=seed + 10 * visit + k)]
        for visit in range(visits)
    ]


def one_class(name: str, images: int, label: int = 3, size: int = 32, seed: int = 0) -> list[Batch]:
    """Nothing but one class."""
    g = torch.Generator().manual_seed(seed)
    return cut(*shift(name).draw(torch.full((images,), label), g), size)


def poisoned(batches: list[Batch], share: float, make: Attack) -> list[Batch]:
    """Replace the given share of each batch by an attacker's images."""
    g = torch.Generator().manual_seed(7)
    result = []
    for images, labels in batches:
        rows = torch.randperm(len(images), generator=g)[: max(1, round(share * len(images)))]
        images, labels = images.clone(), labels.clone()
        images[rows], labels[rows] = make(images, rows, g), -1
        result.append((images, labels))
    return result


def extreme(images: Tensor, rows: Tensor, generator: torch.Generator) -> Tensor:
    """Pixels of -10 or 10."""
    return torch.where(torch.rand(images[rows].shape, generator=generator) < 0.5, -10.0, 10.0)


def saturated(images: Tensor, rows: Tensor, generator: torch.Generator) -> Tensor:
    """Pixels of 0 or 1: noise that no check of the range can see."""
    return (torch.rand(images[rows].shape, generator=generator) < 0.5).to(images.dtype)


def disturbing(images: Tensor, rows: Tensor, _generator: torch.Generator, steps: int = 8) -> Tensor:
    """Images in [0, 1] that spoil the answers to the others through the batch's statistics (after DIA, ICML 2023).

    Projected gradient ascent on the cross-entropy of the other rows against the source's answers, through the source
    network with batch statistics: the attacker knows the network and sees the whole batch.
    """
    model = tiny_network(torch.float32)
    others = torch.ones(len(images), dtype=torch.bool).index_fill(0, rows, False)
    answers = model(images).argmax(dim=1).detach()[others]
    model.train()
    made = images[rows].clone()
    for _ in range(steps):
        made.requires_grad_(True)
        logits = model(images.index_copy(0, rows, made))[others]
        (gradient,) = torch.autograd.grad(F.cross_entropy(logits, answers), made)
        made = (made + 0.25 * gradient.sign()).clamp(0, 1).detach()
    return made
