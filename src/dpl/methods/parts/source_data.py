"""Labelled source batches: round and round at a position that is part of a method's state, and class statistics."""

from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from dpl.core.errors import InputError, SettingError
from dpl.core.state import Stateful
from dpl.methods.base import Source
from dpl.network import Network

__all__ = ["SourceStream", "class_means", "first_batches", "on_network", "predicted_class_statistics"]

_EMPTY = "source is empty: expected at least one batch of (images, labels)"


class SourceStream(Stateful):
    """Gives one source batch after the other and starts over at the end.

    Only the position is saved, not the data: after a reset or in a new process the source is opened again and read up
    to that position. That is exact for a source that gives the same batches each time it is iterated.
    """

    position: int  # batches taken in the current round

    def __init__(self) -> None:
        super().__init__()
        self.batches: Source | None = None
        self._reader: Iterator[tuple[Tensor, Tensor]] | None = None
        self._read = 0  # batches that the open reader has given
        self.declare(position=0)

    def attach(self, batches: Source) -> None:
        """Take the source to read from; it must be one that can be read again and again."""
        if isinstance(batches, Iterator):
            raise SettingError(
                f"source is {type(batches).__name__}, which can be read only once, and this method reads its source "
                "again and again: pass a loader or a list of (images, labels) batches"
            )
        self.batches, self._reader = batches, None

    def next(self, network: Network) -> tuple[Tensor, Tensor]:
        """Return the next (images, labels), where `network` lives."""
        batch = next(self._at_position(), None)
        if batch is None:  # the end of a round
            self.position = 0
            batch = next(self._at_position(), None)
        if batch is None:
            raise SettingError(_EMPTY)
        self.position += 1
        self._read += 1
        return on_network(batch, network)

    def _at_position(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Return the reader, opened anew if the position is not the one where it stands."""
        if self.batches is None:
            raise SettingError(
                "this method trains on labelled source batches at each step and has none; pass them again when a "
                "snapshot is brought back: dpl.load(folder, model, source=...)"
            )
        if self._reader is None or self._read != self.position:
            self._reader, self._read = iter(self.batches), self.position
            next(islice(self._reader, self.position, self.position), None)
        return self._reader

    def __getstate__(self) -> dict[str, Any]:
        """Leave the open reader out of copies: they open their own."""
        return vars(self) | {"_reader": None}


@torch.no_grad()
def class_means(network: Network, batches: Source, enough: int) -> tuple[Tensor, int]:
    """Return the mean source feature of each class [C, d], and the size of the first batch.

    Reading stops once more than `enough` images were seen. A class without images gets a row of zeros.
    """
    total = torch.zeros_like(network.prototypes)
    count = total.new_zeros(len(total), 1)
    size = 0
    for images, labels in first_batches(batches, network, enough):
        _check_labels(labels, len(total))
        total.index_add_(0, labels, network(images).z.to(total.dtype))
        count.index_add_(0, labels, count.new_ones(len(labels), 1))
        size = size or len(labels)
    if not size:
        raise SettingError(_EMPTY)
    return total / count.clamp(min=1), size


@torch.no_grad()
def predicted_class_statistics(network: Network, batches: Source, enough: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return mean and variance of the features of each predicted class [C, d], and which classes have both [C].

    They are computed in float64 on the host.
    """
    classes, width = network.prototypes.shape
    count, total, square = (torch.zeros(classes, columns, dtype=torch.float64) for columns in (1, width, width))
    for images, _ in first_batches(batches, network, enough):
        out = network(images)
        labels, features = out.logits.argmax(dim=1).cpu(), out.z.cpu().double()
        count.index_add_(0, labels, torch.ones(len(labels), 1, dtype=torch.float64))
        total.index_add_(0, labels, features)
        square.index_add_(0, labels, features**2)
    if count.sum() == 0:
        raise SettingError(_EMPTY)
    mean = total / count.clamp(min=1)
    variance = ((square - count * mean**2) / (count - 1).clamp(min=1)).clamp(min=0)
    return mean, variance, count[:, 0] > 1


def first_batches(batches: Source, network: Network, enough: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield source batches where `network` lives, until more than `enough` images were read."""
    seen = 0
    for batch in batches:
        images, labels = on_network(batch, network)
        yield images, labels
        seen += len(images)
        if seen > enough:
            return


def on_network(batch: tuple[Tensor, Tensor], network: Network) -> tuple[Tensor, Tensor]:
    """Return a source batch on the network's device, images in its type, labels as whole numbers."""
    images, labels = batch
    return images.to(network.device, network.dtype), labels.to(network.device).long()


def _check_labels(labels: Tensor, classes: int) -> None:
    if labels.ndim != 1 or len(labels) == 0 or int(labels.min()) < 0 or int(labels.max()) >= classes:
        found = f", from {int(labels.min())} to {int(labels.max())}" if labels.numel() else ""
        raise InputError(
            f"source labels have shape {tuple(labels.shape)}{found}; expected one whole number from 0 to "
            f"{classes - 1} for each image"
        )
