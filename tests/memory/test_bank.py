"""The banks compared with a direct implementation of their rules."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dpl.core.errors import InputError
from dpl.memory.bank import (
    BankPolicy,
    BankRecord,
    ReservoirRecord,
    empty_record,
    empty_reservoir,
    insert_reservoir,
    insert_timely,
    occupied_by_age,
)


class LiteralBank:
    """One list of [name, uncertainty, age] for each class; every age grows with every sample inserted."""

    def __init__(self, size: int, policy: BankPolicy) -> None:
        self.size, self.policy = size, policy
        self.classes: list[list[list[float]]] = [[] for _ in range(policy.classes)]

    def score(self, age: float, uncertainty: float) -> float:
        time = self.policy.time_weight / (1 + math.exp(-age / self.size))
        return time + self.policy.uncertainty_weight * uncertainty / math.log(self.policy.classes)

    def add(self, name: int, label: int, uncertainty: float) -> None:
        if self.make_room(label, self.score(0, uncertainty)):
            self.classes[label].append([name, uncertainty, 0])
        for items in self.classes:
            for item in items:
                item[2] += 1

    def make_room(self, label: int, score: float) -> bool:
        counts = [len(items) for items in self.classes]
        if counts[label] >= self.size / self.policy.classes:
            return self.remove_worst([label], score)
        if sum(counts) < self.size:
            return True
        return self.remove_worst([c for c in range(len(counts)) if counts[c] == max(counts)], score)

    def remove_worst(self, classes: list[int], score: float) -> bool:
        worst, where = -1.0, (-1, -1)
        for label in classes:
            for place, (_, uncertainty, age) in enumerate(self.classes[label]):
                if self.score(age, uncertainty) >= worst:
                    worst, where = self.score(age, uncertainty), (label, place)
        if worst > score:
            self.classes[where[0]].pop(where[1])
            return True
        return False

    def content(self) -> list[tuple[int, int, float, int]]:
        return [(label, *item) for label, items in enumerate(self.classes) for item in items]


def fill(size: int, policy: BankPolicy, batches: list[list[tuple[int, float]]]) -> tuple[BankRecord, list[int]]:
    """Insert batches; return the record and the name (running number) of the sample in each slot."""
    slots, names, first = empty_record(size, torch.empty(0, dtype=torch.float64)), [-1] * size, 0
    for batch in batches:
        labels = torch.tensor([label for label, _ in batch])
        uncertainties = torch.tensor([uncertainty for _, uncertainty in batch], dtype=torch.float64)
        slots, rows, places = insert_timely(slots, labels, uncertainties, policy)
        for row, place in zip(rows.tolist(), places.tolist(), strict=True):
            names[place] = first + row
        first += len(batch)
    return slots, names


def samples(classes: int) -> st.SearchStrategy[list[list[tuple[int, float]]]]:
    uncertainty = st.sampled_from([0.0, 0.1, 0.5, math.log(2), 2.0])  # few values: many ties
    one = st.tuples(st.integers(0, classes - 1), uncertainty)
    return st.lists(st.lists(one, min_size=1, max_size=20), min_size=1, max_size=6)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_equals_the_literal_bank(data: st.DataObject) -> None:
    classes, size = data.draw(st.integers(2, 12)), data.draw(st.integers(1, 10))
    policy = BankPolicy(classes, data.draw(st.sampled_from([0.0, 1.0])), data.draw(st.sampled_from([0.0, 1.0, 3.0])))
    batches = data.draw(samples(classes))
    slots, names = fill(size, policy, batches)
    literal = LiteralBank(size, policy)
    for name, (label, uncertainty) in enumerate(sample for batch in batches for sample in batch):
        literal.add(name, label, uncertainty)
    ours = [
        (int(slots.labels[s]), names[s], float(slots.uncertainty[s]), int(slots.ages[s]))
        for s in occupied_by_age(slots)
    ]
    assert ours == literal.content()


def test_a_run_of_one_class_cannot_fill_the_bank() -> None:
    slots, _ = fill(64, BankPolicy(10), [[(3, 0.5)] * 500])
    assert (slots.labels == 3).sum() == 7  # a fair share of 6.4, rounded up
    slots, _ = fill(64, BankPolicy(10), [[(i % 10, 0.5) for i in range(500)], [(3, 0.5)] * 500])
    assert slots.labels.bincount(minlength=10).max() <= 7
    assert (slots.labels >= 0).all()


def test_certain_samples_replace_uncertain_ones() -> None:
    slots, names = fill(2, BankPolicy(2, time_weight=0.0), [[(0, 0.6), (1, 0.6), (0, 0.9), (1, 0.1)]])
    assert sorted(names) == [0, 3]
    assert sorted(slots.uncertainty.tolist()) == [0.1, 0.6]


def test_unequal_lengths_are_refused() -> None:
    with pytest.raises(InputError, match=r"labels have shape \(2,\)"):
        insert_timely(empty_record(4, torch.empty(0)), torch.zeros(2, dtype=torch.int64), torch.zeros(3), BankPolicy(2))


def insert_drawn(
    held: list[int], counts: list[int], labels: list[int], seed: int = 0
) -> tuple[list[int], list[int], list[int]]:
    """Insert with seeded draws; return the labels held, the count of each class, and the rows in the bank."""
    draws = torch.rand(len(labels), 3, generator=torch.Generator().manual_seed(seed))
    entered = torch.tensor([-1 if label < 0 else slot for slot, label in enumerate(held)])
    before = ReservoirRecord(torch.tensor(held), entered, torch.tensor(counts))
    record, rows, _ = insert_reservoir(before, torch.tensor(labels), draws)
    return record.labels.tolist(), record.counts.tolist(), rows.tolist()


def test_a_reservoir_fills_before_it_draws() -> None:
    held, counts, rows = insert_drawn([-1] * 4, [0, 0], [1, 1, 0])
    assert held == [1, 1, 0, -1]
    assert counts == [1, 2]
    assert rows == [0, 1, 2]


def test_a_sample_of_a_small_class_replaces_one_of_the_largest() -> None:
    for seed in range(20):
        held, _, rows = insert_drawn([0, 0, 0, 1, 2, 2, 2], [3, 1, 3, 0], [3, 1], seed)
        assert sorted(rows) == [0, 1]
        assert sorted(held) in ([0, 0, 1, 1, 2, 2, 3],)  # first one of the two largest, then the other


def test_every_sample_of_a_single_class_is_kept_with_the_same_probability() -> None:
    kept = torch.zeros(40)
    for seed in range(2000):
        kept[insert_drawn([-1] * 8, [0], [0] * 40, seed)[2]] += 1
    expected, spread = 2000 * 8 / 40, (2000 * 0.2 * 0.8) ** 0.5
    assert (kept - expected).abs().max() < 4.5 * spread


def test_the_reservoirs_classes_stay_balanced_when_they_come_in_runs() -> None:
    held, counts, _ = insert_drawn([-1] * 12, [0] * 4, [0] * 50 + [1] * 20 + [2] * 100 + [3] * 3)
    assert counts == [50, 20, 100, 3]
    assert [held.count(label) for label in range(4)] == [3, 3, 3, 3]


def test_a_reservoir_draws_among_samples_in_their_order_of_entry() -> None:
    """Slots are used again, so their order is not that of entry."""
    record, names = empty_reservoir(3, 1, torch.device("cpu")), [-1] * 3
    for name, place in enumerate([0, 0, 0, 0.0, 0.4, 0.0]):
        record, rows, slots = insert_reservoir(record, torch.tensor([0]), torch.tensor([[0.0, 0.0, place]]))
        names[int(slots)] = name
        assert rows.tolist() == [0]
    # 3 replaces 0, then 4 replaces 2 (the second oldest of 1, 2, 3), then 5 replaces 1
    assert sorted(names) == [3, 4, 5]
