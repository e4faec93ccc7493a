import math

import torch

from dpl.objectives.consistency import soft_cross_entropy, symmetric_cross_entropy


def slow(p: list[float], q: list[float]) -> float:
    return -sum(b * math.log(a) for a, b in zip(p, q, strict=True))


def test_both_equal_a_slow_loop() -> None:
    torch.manual_seed(0)
    a, b = torch.randn(2, 5, 4, dtype=torch.float64)
    p, q = a.softmax(dim=1).tolist(), b.softmax(dim=1).tolist()
    for i in range(5):
        assert math.isclose(soft_cross_entropy(a, b)[i], slow(p[i], q[i]), rel_tol=1e-12)
        expected = (slow(p[i], q[i]) + slow(q[i], p[i])) / 2
        assert math.isclose(symmetric_cross_entropy(a, b)[i], expected, rel_tol=1e-12)


def test_gradients_reach_both_sides() -> None:
    a, b = torch.randn(3, 4, requires_grad=True), torch.randn(3, 4, requires_grad=True)
    symmetric_cross_entropy(a, b).sum().backward()
    assert a.grad is not None
    assert a.grad.abs().sum() > 0
    assert b.grad is not None
    assert b.grad.abs().sum() > 0


def test_half_precision_is_computed_in_float32() -> None:
    a = torch.randn(3, 4).bfloat16()
    assert soft_cross_entropy(a, a).dtype == torch.float32
    torch.testing.assert_close(symmetric_cross_entropy(a, a), symmetric_cross_entropy(a.float(), a.float()))
