"""Declared state is restored to the last digit."""

import torch

from dpl.core.state import Stateful


class Counter(Stateful):
    def __init__(self) -> None:
        super().__init__()
        self.declare(batches=0, mean=0.0, seen=None, sums=torch.zeros(2))


def test_numbers_are_restored_to_the_last_digit() -> None:
    one, other = Counter(), Counter()
    one.batches, one.mean, one.sums = 2**40 + 1, 1 / 3, torch.tensor([0.1, 0.2])
    other.restore(one.state())
    assert (other.batches, other.mean, other.seen) == (2**40 + 1, 1 / 3, None)
    assert torch.equal(other.sums, one.sums)
    assert isinstance(other.batches, int)


def test_the_state_is_a_copy() -> None:
    one = Counter()
    kept = one.state()
    one.sums += 1
    assert torch.equal(kept["sums"], torch.zeros(2))
