import math

import torch

from dpl.objectives.selection import entropy_margin, masked_mean, min_max, similarity_to


def test_margin_is_a_share_of_the_largest_entropy() -> None:
    assert entropy_margin(torch.zeros(3, 10), 0.4) == 0.4 * math.log(10)


def test_masked_mean_sees_the_masked_rows_alone() -> None:
    values = torch.tensor([[1.0, 2.0], [math.nan, math.inf], [3.0, 6.0]])
    mean = masked_mean(values, torch.tensor([True, False, True]))
    assert mean.tolist() == [2.0, 4.0]


def test_masked_mean_of_nothing_is_zero_with_zero_gradient() -> None:
    values = torch.randn(4, requires_grad=True)
    mean = masked_mean(values, torch.zeros(4, dtype=torch.bool))
    mean.backward()
    assert mean == 0
    assert values.grad is not None
    assert (values.grad == 0).all()


def test_min_max_stretches_and_survives_equal_values() -> None:
    assert min_max(torch.tensor([2.0, 4.0, 3.0])).tolist() == [0.0, 1.0, 0.5]
    assert min_max(torch.tensor([2.0, 2.0])).tolist() == [0.0, 0.0]
    assert min_max(torch.tensor([2.0])).tolist() == [0.0]


def test_nothing_is_similar_to_an_empty_average() -> None:
    p = torch.eye(3)
    assert similarity_to(torch.zeros(3), p).tolist() == [0.0, 0.0, 0.0]
    assert similarity_to(torch.tensor([2.0, 0.0, 0.0]), p).tolist() == [1.0, 0.0, 0.0]
