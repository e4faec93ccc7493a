"""Ring memories and the neighbours' vote."""

from collections import deque

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dpl.core.errors import InputError
from dpl.memory.queue import neighbour_vote, write_ring


@given(size=st.integers(1, 7), batches=st.lists(st.integers(1, 10), max_size=8))
def test_a_ring_keeps_the_newest_rows(size: int, batches: list[int]) -> None:
    memory, newest = torch.zeros(size, 2), deque([0.0] * size, maxlen=size)
    position, count = 0, 0
    for batch in batches:
        values = torch.arange(count + 1, count + batch + 1, dtype=torch.float32)
        position = write_ring(memory, values[:, None].expand(-1, 2), position)
        newest.extend(values.tolist())
        count += batch
    assert memory.roll(-position, 0)[:, 0].tolist() == list(newest)  # oldest first
    assert torch.equal(memory[:, 0], memory[:, 1])


def test_a_ring_also_holds_labels_and_never_keeps_a_graph() -> None:
    labels, features = torch.zeros(4, dtype=torch.long), torch.zeros(4, 3)
    assert write_ring(labels, torch.tensor([7, 8, 9]), 2) == 1
    assert labels.tolist() == [9, 0, 7, 8]
    write_ring(features, torch.ones(2, 3, requires_grad=True) * 2, 0)
    assert not features.requires_grad
    with pytest.raises(InputError, match="does not fit"):
        write_ring(features, torch.ones(2, 4), 0)


def test_the_vote_is_the_mean_of_the_nearest_by_cosine() -> None:
    generator = torch.Generator().manual_seed(0)
    features = 5 * torch.randn(6, 3, generator=generator)
    bank = torch.nn.functional.normalize(torch.randn(20, 3, generator=generator), dim=1)
    probabilities = torch.rand(20, 4, generator=generator)
    votes = neighbour_vote(features, bank, probabilities, 5)
    for feature, vote in zip(features, votes, strict=True):
        cosines = torch.nn.functional.cosine_similarity(feature[None], bank)
        nearest = sorted(range(20), key=lambda i: -cosines[i].item())[:5]
        torch.testing.assert_close(vote, probabilities[nearest].mean(dim=0))


def test_a_bank_smaller_than_the_number_of_neighbours_votes_as_a_whole() -> None:
    probabilities = torch.tensor([[1.0, 0.0], [0.5, 0.5]])
    vote = neighbour_vote(torch.ones(3, 2), torch.eye(2), probabilities, 10)
    torch.testing.assert_close(vote, torch.tensor([[0.75, 0.25]]).expand(3, 2))
    with pytest.raises(InputError, match="at least one"):
        neighbour_vote(torch.ones(3, 2), torch.eye(2)[:0], probabilities[:0], 10)
