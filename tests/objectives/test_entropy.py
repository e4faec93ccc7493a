"""Losses on the entropy of predictions, and means over selected samples."""

import math

import pytest
import torch

from dpl.objectives import (
    entropy,
    entropy_margin,
    entropy_of_probabilities,
    masked_mean,
    min_max,
    opinion_entropy,
    similarity_to,
    soft_likelihood_ratio,
)


def test_the_two_entropies_agree_and_zero_probabilities_are_allowed() -> None:
    logits = torch.randn(6, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(entropy_of_probabilities(logits.softmax(dim=1), 0.0), entropy(logits))
    assert entropy_of_probabilities(torch.tensor([1.0, 0.0, 0.0]), 1e-12) == 0


def test_soft_likelihood_ratio_equals_a_loop() -> None:
    torch.manual_seed(0)
    logits = 3 * torch.randn(6, 5, dtype=torch.float64)
    for row, value in zip(logits.softmax(dim=1).tolist(), soft_likelihood_ratio(logits), strict=True):
        expected = -sum(min(p, 0.99) * math.log(min(p, 0.99) / (1 - min(p, 0.99)) + 1e-5) for p in row)
        assert math.isclose(value, expected, rel_tol=1e-12)


def test_soft_likelihood_ratio_of_a_certain_prediction_is_finite_with_zero_gradient() -> None:
    logits = torch.tensor([[80.0, 0.0, 0.0]], requires_grad=True)
    value = soft_likelihood_ratio(logits)
    value.sum().backward()
    assert value.isfinite().all()
    assert logits.grad is not None
    assert logits.grad.abs().max() < 1e-6


def test_soft_likelihood_ratio_pushes_an_uncertain_prediction() -> None:
    logits = torch.tensor([[1.0, 0.0, 0.0]], requires_grad=True)
    soft_likelihood_ratio(logits).sum().backward()
    assert logits.grad is not None
    assert logits.grad[0, 0] < -0.1


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


def test_opinion_entropy_is_that_of_classes_and_the_unknown() -> None:
    logits = torch.randn(6, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    mass = torch.cat([logits.exp(), torch.full((6, 1), 4.0)], dim=1)
    shares = mass / mass.sum(dim=1, keepdim=True) + 1e-7
    expected = -(shares * shares.log()).sum(dim=1)
    assert torch.allclose(opinion_entropy(logits), expected, atol=1e-12)
    assert not torch.allclose(opinion_entropy(logits, 1000.0), expected)


def test_opinion_entropy_cannot_make_logits_longer() -> None:
    logits = torch.randn(6, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64, requires_grad=True)
    opinion_entropy(logits).sum().backward()
    assert (logits.grad * logits).sum(dim=1).abs().max() < 1e-12
    assert logits.grad.abs().max() > 1e-3


@pytest.mark.parametrize("scale", [0.0, 1e4])
def test_opinion_entropy_of_no_or_huge_logits_is_finite(scale: float) -> None:
    logits = (scale * torch.randn(3, 4)).requires_grad_()
    value = opinion_entropy(logits).sum()
    value.backward()
    assert value.isfinite()
    assert logits.grad.isfinite().all()
