"""What RoTTA, NOTE and SoTTA share: images are predicted as they come, and learnt from later, out of a small bank."""

from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor

from dpl.core.errors import InputError
from dpl.core.settings import setting
from dpl.memory.bank import ReservoirRecord, empty_reservoir, insert_reservoir
from dpl.methods.base import GradientMethod
from dpl.methods.settings import GradientSettings
from dpl.network import Network

__all__ = ["MemoryBankMethod", "MemoryBankSettings", "ReservoirMethod"]


@dataclass(frozen=True, kw_only=True)
class MemoryBankSettings(GradientSettings):
    """Settings of a method with a bank; `steps` is the number of updates whenever it learns."""

    capacity: int = setting(64, "N: samples in the bank", low=1)
    update_every: int = setting(64, "images between updates", low=1, formerly="every")


B = TypeVar("B", bound=MemoryBankSettings)


class MemoryBankMethod(GradientMethod[B], Generic[B]):
    """Predict, fill the bank, and learn from it whenever `update_every` images have come."""

    samples: Tensor | None  # [N, ...]
    seen: int  # images since the last update

    def __init__(self, network: Network, settings: B) -> None:
        super().__init__(network, settings)
        self.declare(samples=None, seen=0)

    def choose(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Decide which of the predicted samples enter the bank; return their rows and the slots they take."""
        raise NotImplementedError

    def learn(self) -> None:
        """Update from the bank."""
        raise NotImplementedError

    def step(self, images: Tensor) -> Tensor:
        """Predict the whole batch, then offer it to the bank in parts that end where an update is due."""
        self._check_size(images)
        logits = self.predict(images)
        first, self.facts = 0, {"updated": False, "reason": f"updates come every {self.settings.update_every} images"}
        while first < len(images):
            part = slice(first, first + self.settings.update_every - self.seen)
            self._remember(images[part], logits[part])
            first += len(images[part])
            if self.seen == self.settings.update_every:
                self.seen = 0
                self.learn()
        return self.answer(images, logits)

    @torch.no_grad()
    def _remember(self, images: Tensor, logits: Tensor) -> None:
        rows, slots = self.choose(logits)
        if self.samples is None:
            self.samples = images.new_zeros(self.settings.capacity, *images.shape[1:])
        self.samples = self.samples.index_copy(0, slots, images[rows])
        self.seen += len(images)

    def stored(self, slots: Tensor) -> Tensor:
        """Return the samples in the given slots."""
        if self.samples is None:
            raise InputError("the bank is empty; it fills with the images that are predicted")
        return self.samples[slots]

    def _check_size(self, images: Tensor) -> None:
        if self.samples is not None and self.samples.shape[1:] != images.shape[1:]:
            raise InputError(
                f"images have shape {tuple(images.shape[1:])}, those in the bank {tuple(self.samples.shape[1:])}; "
                "resize them, or call reset() when the stream changes"
            )


class ReservoirMethod(MemoryBankMethod[B], Generic[B]):
    """A method whose bank is a class-balanced reservoir."""

    labels: Tensor  # of the bank's samples; these three are its `ReservoirRecord`
    entered: Tensor
    counts: Tensor | None

    def __init__(self, network: Network, settings: B) -> None:
        super().__init__(network, settings)
        empty = empty_reservoir(settings.capacity, 0, network.device)
        self.declare(labels=empty.labels, entered=empty.entered, counts=None)

    def offer(self, labels: Tensor, draws: Tensor, classes: int) -> tuple[Tensor, Tensor]:
        """Offer samples of these predicted classes [B] with their draws [B, 3]; return the rows and slots taken."""
        if self.counts is None:
            self.counts = torch.zeros(classes, dtype=torch.int64, device=labels.device)
        record = ReservoirRecord(self.labels, self.entered, self.counts)
        (self.labels, self.entered, self.counts), rows, slots = insert_reservoir(record, labels, draws)
        return rows, slots

    def occupied(self) -> Tensor:
        """Return the occupied slots, class by class, in order of entry."""
        order = self.entered.argsort()
        order = order[self.labels[order].argsort(stable=True)]
        return order[self.labels[order] >= 0]
