import math

import torch

from dpl.objectives.robust import soft_likelihood_ratio


def test_equals_a_slow_loop() -> None:
    torch.manual_seed(0)
    logits = 3 * torch.randn(6, 5, dtype=torch.float64)
    for row, value in zip(logits.softmax(dim=1).tolist(), soft_likelihood_ratio(logits), strict=True):
        expected = -sum(min(p, 0.99) * math.log(min(p, 0.99) / (1 - min(p, 0.99)) + 1e-5) for p in row)
        assert math.isclose(value, expected, rel_tol=1e-12)


def test_a_certain_prediction_asks_for_nothing_more_and_stays_finite() -> None:
    logits = torch.tensor([[80.0, 0.0, 0.0]], requires_grad=True)
    value = soft_likelihood_ratio(logits)
    value.sum().backward()
    assert value.isfinite().all()
    assert logits.grad is not None
    assert logits.grad.abs().max() < 1e-6


def test_an_unsure_prediction_is_pushed() -> None:
    logits = torch.tensor([[1.0, 0.0, 0.0]], requires_grad=True)
    soft_likelihood_ratio(logits).sum().backward()
    assert logits.grad is not None
    assert logits.grad[0, 0] < -0.1
