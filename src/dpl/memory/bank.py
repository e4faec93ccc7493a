"""Small banks of samples that stay balanced over predicted classes, whatever the order in which these come.

`offer` keeps recent and certain samples: Yuan, Xie, Li, Robust Test-Time Adaptation in Dynamic Scenarios (RoTTA), CVPR
2023. `offer_by_lot` keeps samples from all times alike: Gong et al., NOTE, NeurIPS 2022.

Samples are offered one after another, and each decision depends on all before it, so these are sequential algorithms
over a few dozen slots: on the host they take microseconds for a sample, where a tensor formulation would launch a
dozen kernels for each. The bank's record comes to the host once for a whole batch.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from dpl.core.errors import InputError

__all__ = ["BankRule", "Slots", "empty_slots", "offer", "offer_by_lot", "oldest_first"]


class Slots(NamedTuple):
    """What a bank knows of the sample in each slot: three vectors [N]."""

    labels: Tensor  # predicted class, int64; -1: the slot is empty
    ages: Tensor  # samples offered since this one was, counting itself, int64
    uncertainty: Tensor


@dataclass(frozen=True)
class BankRule:
    """When a sample is worth more than another: score = time_weight sigmoid(age / N) + doubt_weight u / ln C.

    A low score is good. Every one of `classes` classes has a fair share of N / C slots.
    """

    classes: int
    time_weight: float = 1.0
    doubt_weight: float = 1.0


def empty_slots(size: int, like: Tensor) -> Slots:
    """Return the record of an empty bank on the device, and with the precision, of `like`."""
    none = torch.full((size,), -1, device=like.device)
    return Slots(none, torch.zeros_like(none), torch.zeros(size, device=like.device, dtype=like.dtype))


def offer(slots: Slots, labels: Tensor, uncertainty: Tensor, rule: BankRule) -> tuple[Slots, Tensor, Tensor]:
    """Offer samples with these predicted labels and uncertainties [B], in order.

    A class below its fair share takes an empty slot; in a full bank, that of the worst sample of the largest classes.
    A class with its share can only replace its own worst sample. Nobody makes room for a worse newcomer.

    Returns:
        The new record; the rows of those samples that are in the bank at the end; the slot of each of these.
    """
    if labels.shape != uncertainty.shape or labels.ndim != 1:
        raise InputError(
            f"labels have shape {tuple(labels.shape)} and uncertainty {tuple(uncertainty.shape)}; expected [B] twice"
        )
    ledger = _Ledger(slots, rule)
    for label, doubt in zip(labels.tolist(), uncertainty.tolist(), strict=True):
        ledger.add(label, doubt)
    return ledger.result(slots)


def offer_by_lot(held: Tensor, counts: Tensor, labels: Tensor, luck: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Offer samples with these predicted labels [B] to a class-balanced reservoir, in order.

    In a full bank, a sample of a smaller class takes a random place among those of a largest class; one of a largest
    class takes a random place of its own class with probability (places of the class / samples of it ever offered).

    Args:
        held: the label in each slot [N]; -1: empty.
        counts: how many samples of each class were ever offered [C].
        labels: the newcomers' labels [B].
        luck: three random numbers in [0, 1) for each newcomer [B, 3].

    Returns:
        The new `held` and `counts`; the rows of those samples that are in the bank at the end; the slot of each.
    """
    reservoir = _Reservoir(held.tolist(), counts.tolist())
    for row, (label, numbers) in enumerate(zip(labels.tolist(), luck.tolist(), strict=True)):
        reservoir.add(row, label, *numbers)
    taken = sorted(reservoir.rows)
    rows = [reservoir.rows[slot] for slot in taken]
    results = reservoir.held, reservoir.counts, rows, taken
    new = [torch.tensor(values, dtype=torch.int64, device=held.device) for values in results]
    return new[0], new[1], new[2], new[3]


def oldest_first(slots: Slots) -> Tensor:
    """Return the occupied slots, class by class, the oldest sample of a class first."""
    labels, ages = slots.labels.tolist(), slots.ages.tolist()
    order = sorted(
        (label, -age, slot) for slot, (label, age) in enumerate(zip(labels, ages, strict=True)) if label >= 0
    )
    return torch.tensor([slot for _, _, slot in order], dtype=torch.int64, device=slots.labels.device)


class _Ledger:
    """The record on the host while samples come in; birth dates instead of ages, so that nobody has to age."""

    def __init__(self, slots: Slots, rule: BankRule) -> None:
        self.rule, self.now = rule, 0
        self.labels: list[int] = slots.labels.tolist()
        self.born: list[int] = [-age for age in slots.ages.tolist()]
        self.doubts: list[float] = slots.uncertainty.tolist()
        self.size = len(self.labels)
        self.members: dict[int, list[int]] = {}
        for slot, label in enumerate(self.labels):
            self.members.setdefault(label, []).append(slot)
        self.free = self.members.pop(-1, [])

    def add(self, label: int, doubt: float) -> None:
        """Offer one sample; time goes on whether it is taken or not."""
        slot = self._room_for(label, self._score(0, doubt))
        if slot is not None:
            self.labels[slot], self.born[slot], self.doubts[slot] = label, self.now, doubt
            self.members.setdefault(label, []).append(slot)
        self.now += 1

    def _room_for(self, label: int, score: float) -> int | None:
        own = self.members.get(label, [])
        if len(own) >= self.size / self.rule.classes:
            return self._evict(own, score)
        if self.free:
            return self.free.pop(0)
        largest = max(map(len, self.members.values()))
        return self._evict([s for slots in self.members.values() if len(slots) == largest for s in slots], score)

    def _evict(self, candidates: list[int], score: float) -> int | None:
        """Free the worst slot if it is worse than `score`; among equals the highest class, then the youngest."""
        worst_score, label, _, worst = max(
            (self._score(self.now - self.born[s], self.doubts[s]), self.labels[s], self.born[s], s) for s in candidates
        )
        if not worst_score > score:
            return None
        self.members[label].remove(worst)
        return worst

    def _score(self, age: int, doubt: float) -> float:
        time = self.rule.time_weight / (1 + math.exp(-age / self.size))
        return time + self.rule.doubt_weight * doubt / math.log(max(self.rule.classes, 2))

    def result(self, slots: Slots) -> tuple[Slots, Tensor, Tensor]:
        """Return the record as tensors, and which of the new samples lie where."""
        device = slots.labels.device
        taken = [slot for slot in range(self.size) if self.labels[slot] >= 0 and self.born[slot] >= 0]
        ages = [self.now - born if label >= 0 else 0 for born, label in zip(self.born, self.labels, strict=True)]
        new = Slots(
            torch.tensor(self.labels, device=device),
            torch.tensor(ages, device=device),
            torch.tensor(self.doubts, device=device, dtype=slots.uncertainty.dtype),
        )
        rows = torch.tensor([self.born[slot] for slot in taken], dtype=torch.int64, device=device)
        return new, rows, torch.tensor(taken, dtype=torch.int64, device=device)


class _Reservoir:
    """The class-balanced reservoir on the host while samples come in."""

    def __init__(self, held: list[int], counts: list[int]) -> None:
        self.held, self.counts = held, counts
        self.rows: dict[int, int] = {}  # which newcomer is in a slot
        self.members: dict[int, list[int]] = {}
        for slot, label in enumerate(held):
            self.members.setdefault(label, []).append(slot)
        self.free = self.members.pop(-1, [])

    def add(self, row: int, label: int, entry: float, which_class: float, which_place: float) -> None:
        """Offer one sample."""
        self.counts[label] += 1
        slot = self.free.pop(0) if self.free else self._draw_place(label, entry, which_class, which_place)
        if slot is not None:
            self.held[slot], self.rows[slot] = label, row
            self.members.setdefault(label, []).append(slot)

    def _draw_place(self, label: int, entry: float, which_class: float, which_place: float) -> int | None:
        most = max(map(len, self.members.values()))
        largest = sorted(owner for owner, places in self.members.items() if len(places) == most)
        if label not in largest:
            label = largest[int(which_class * len(largest))]
        elif entry > most / self.counts[label]:
            return None
        return self.members[label].pop(int(which_place * most))
