"""Small memory banks of samples, balanced over the predicted classes in any class order.

`insert_timely` prefers recent samples of low uncertainty: Yuan, Xie, Li, Robust Test-Time Adaptation in Dynamic
Scenarios (RoTTA), CVPR 2023. `insert_reservoir` keeps old and new samples with equal probability: Gong et al., NOTE,
NeurIPS 2022.

Samples are inserted one after another, and each decision depends on all earlier ones. These sequential algorithms run
on the host, where a sample takes microseconds; a tensor formulation would launch a dozen kernels for each sample. The
record of the bank and what is offered come to the host together, in one read.
"""

import math
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from dpl.core.errors import InputError

__all__ = [
    "BankPolicy", "BankRecord", "ReservoirRecord", "empty_record", "empty_reservoir", "insert_reservoir",
    "insert_timely", "occupied_by_age",
]  # fmt: skip


class BankRecord(NamedTuple):
    """Label, age and uncertainty of the sample in each slot of a bank: three vectors [N]."""

    labels: Tensor  # predicted class, int64; -1: the slot is empty
    ages: Tensor  # samples inserted since this one, itself included, int64
    uncertainty: Tensor


class ReservoirRecord(NamedTuple):
    """What a class-balanced reservoir of N slots knows of its samples and of those that came before."""

    labels: Tensor  # predicted class of the sample in each slot [N], int64; -1: the slot is empty
    entered: Tensor  # when it came in, counted in samples that did [N], int64
    counts: Tensor  # samples of each class offered so far [C], int64


@dataclass(frozen=True)
class BankPolicy:
    """The score of a sample: time_weight sigmoid(age / N) + uncertainty_weight u / ln C; the lowest scores stay.

    Each of the `classes` classes is entitled to N / C slots.
    """

    classes: int
    time_weight: float = 1.0
    uncertainty_weight: float = 1.0


def empty_record(size: int, like: Tensor) -> BankRecord:
    """Return the record of an empty bank, with the device and dtype of `like`."""
    none = torch.full((size,), -1, device=like.device)
    return BankRecord(none, torch.zeros_like(none), torch.zeros(size, device=like.device, dtype=like.dtype))


def empty_reservoir(size: int, classes: int, device: torch.device) -> ReservoirRecord:
    """Return the record of an empty reservoir."""
    none = torch.full((size,), -1, device=device)
    return ReservoirRecord(none, none.clone(), torch.zeros(classes, dtype=torch.int64, device=device))


def insert_timely(
    record: BankRecord, labels: Tensor, uncertainty: Tensor, policy: BankPolicy
) -> tuple[BankRecord, Tensor, Tensor]:
    """Insert samples with these predicted labels and uncertainties [B], in order.

    A class with fewer than its N / C slots takes an empty slot. If the bank is full, it takes the slot of the sample
    with the highest score among the largest classes. Any other class can only replace its own sample of the highest
    score. A sample never replaces one of a lower score.

    Returns:
        The new record; the rows of the new samples that are in the bank at the end; the slot of each of these.
    """
    if labels.shape != uncertainty.shape or labels.ndim != 1:
        raise InputError(
            f"labels have shape {tuple(labels.shape)} and uncertainty {tuple(uncertainty.shape)}; expected [B] twice"
        )
    held, ages, doubts, offered, values = _on_host(*record, labels, uncertainty)
    bank = _TimelyBank(_whole(held), _whole(ages), doubts, policy)
    for label, value in zip(_whole(offered), values, strict=True):
        bank.add(label, value)
    return bank.result(record)


def insert_reservoir(record: ReservoirRecord, labels: Tensor, draws: Tensor) -> tuple[ReservoirRecord, Tensor, Tensor]:
    """Insert samples with these predicted labels [B] into a class-balanced reservoir, in order.

    If the bank is full, a sample of a smaller class replaces a random sample of one of the largest classes. A sample of
    a largest class replaces a random one of its class with probability (slots of the class / samples of it so far).

    Args:
        record: what the reservoir holds.
        labels: labels of the new samples [B]; -1: not offered.
        draws: three random numbers in [0, 1) for each new sample [B, 3], on the host: whether it enters (0: always),
            which of the largest classes gives way, and which of its samples in their order of entry.

    Returns:
        The new record; the rows of the new samples that are in the bank at the end; the slot of each.
    """
    *held, offered = map(_whole, _on_host(*record, labels))
    reservoir = _ReservoirBank(*held)
    for row, (label, numbers) in enumerate(zip(offered, draws.tolist(), strict=True)):
        if label >= 0:
            reservoir.add(row, label, *numbers)
    taken = sorted(reservoir.rows)
    rows = [reservoir.rows[slot] for slot in taken]
    results = reservoir.held, reservoir.entered, reservoir.counts, rows, taken
    new = [torch.tensor(values, dtype=torch.int64, device=record.labels.device) for values in results]
    return ReservoirRecord(new[0], new[1], new[2]), new[3], new[4]


def occupied_by_age(record: BankRecord) -> Tensor:
    """Return the occupied slots, class by class, the oldest sample of a class first."""
    labels, ages = map(_whole, _on_host(record.labels, record.ages))
    order = sorted(
        (label, -age, slot) for slot, (label, age) in enumerate(zip(labels, ages, strict=True)) if label >= 0
    )
    return torch.tensor([slot for _, _, slot in order], dtype=torch.int64, device=record.labels.device)


def _on_host(*vectors: Tensor) -> list[list[float]]:
    """Read vectors in one transfer; whole numbers below 2^53 stay exact."""
    numbers: list[float] = torch.cat([vector.double() for vector in vectors]).tolist()
    ends = list(accumulate(map(len, vectors)))
    return [numbers[end - len(vector) : end] for vector, end in zip(vectors, ends, strict=True)]


def _whole(numbers: list[float]) -> list[int]:
    return list(map(int, numbers))


class _TimelyBank:
    """The record on the host during insertion; it stores insertion times, so that no age has to be advanced."""

    def __init__(self, labels: list[int], ages: list[int], uncertainties: list[float], policy: BankPolicy) -> None:
        self.policy, self.now = policy, 0
        self.labels, self.uncertainties = labels, uncertainties
        self.inserted = [-age for age in ages]
        self.size = len(self.labels)
        self.members: dict[int, list[int]] = {}
        for slot, label in enumerate(self.labels):
            self.members.setdefault(label, []).append(slot)
        self.free = self.members.pop(-1, [])

    def add(self, label: int, uncertainty: float) -> None:
        """Insert one sample if a slot can be found; the time advances in either case."""
        slot = self._find_slot(label, self._score(0, uncertainty))
        if slot is not None:
            self.labels[slot], self.inserted[slot], self.uncertainties[slot] = label, self.now, uncertainty
            self.members.setdefault(label, []).append(slot)
        self.now += 1

    def _find_slot(self, label: int, score: float) -> int | None:
        own = self.members.get(label, [])
        if len(own) >= self.size / self.policy.classes:
            return self._evict(own, score)
        if self.free:
            return self.free.pop(0)
        largest = max(map(len, self.members.values()))
        return self._evict([s for slots in self.members.values() if len(slots) == largest for s in slots], score)

    def _evict(self, candidates: list[int], score: float) -> int | None:
        """Free the slot of the highest score if that is above `score`; of equals the highest class, then the newest."""
        worst_score, label, _, worst = max(
            (self._score(self.now - self.inserted[s], self.uncertainties[s]), self.labels[s], self.inserted[s], s)
            for s in candidates
        )
        if not worst_score > score:
            return None
        self.members[label].remove(worst)
        return worst

    def _score(self, age: int, uncertainty: float) -> float:
        time = self.policy.time_weight / (1 + math.exp(-age / self.size))
        return time + self.policy.uncertainty_weight * uncertainty / math.log(max(self.policy.classes, 2))

    def result(self, record: BankRecord) -> tuple[BankRecord, Tensor, Tensor]:
        """Return the record as tensors, the rows of the new samples in the bank, and their slots."""
        device = record.labels.device
        taken = [slot for slot in range(self.size) if self.labels[slot] >= 0 and self.inserted[slot] >= 0]
        ages = [
            self.now - inserted if label >= 0 else 0 for inserted, label in zip(self.inserted, self.labels, strict=True)
        ]
        new = BankRecord(
            torch.tensor(self.labels, device=device),
            torch.tensor(ages, device=device),
            torch.tensor(self.uncertainties, device=device, dtype=record.uncertainty.dtype),
        )
        rows = torch.tensor([self.inserted[slot] for slot in taken], dtype=torch.int64, device=device)
        return new, rows, torch.tensor(taken, dtype=torch.int64, device=device)


class _ReservoirBank:
    """The class-balanced reservoir on the host during insertion."""

    def __init__(self, held: list[int], entered: list[int], counts: list[int]) -> None:
        self.held, self.entered, self.counts = held, entered, counts
        self.next = 1 + max(self.entered)
        self.rows: dict[int, int] = {}  # slot -> row of the new sample in it
        self.members: dict[int, list[int]] = {}  # class -> its slots in order of entry
        for slot in sorted(range(len(self.held)), key=self.entered.__getitem__):
            self.members.setdefault(self.held[slot], []).append(slot)
        self.free = self.members.pop(-1, [])

    def add(self, row: int, label: int, entry: float, which_class: float, which_slot: float) -> None:
        """Insert one sample if a slot can be found."""
        self.counts[label] += 1
        slot = self.free.pop(0) if self.free else self._draw_slot(label, entry, which_class, which_slot)
        if slot is not None:
            self.held[slot], self.entered[slot], self.rows[slot] = label, self.next, row
            self.next += 1
            self.members.setdefault(label, []).append(slot)

    def _draw_slot(self, label: int, entry: float, which_class: float, which_slot: float) -> int | None:
        most = max(map(len, self.members.values()))
        largest = sorted(owner for owner, slots in self.members.items() if len(slots) == most)
        if label not in largest:
            label = largest[int(which_class * len(largest))]
        elif entry > most / self.counts[label]:
            return None
        return self.members[label].pop(min(int(which_slot * most), most - 1))
