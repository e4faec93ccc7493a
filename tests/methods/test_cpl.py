"""CPL: the conjugate label in closed form, and the second pass."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import dpl
from dpl.objectives import conjugate_loss, entropy
from parity.tiny import stream, tiny_network


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def solved(logits: torch.Tensor, epsilon: float, temperature: float) -> torch.Tensor:
    """The loss with one linear system for each sample."""
    losses = []
    for h in logits / temperature:
        p = h.softmax(dim=0)
        matrix = torch.eye(len(p), dtype=p.dtype) + epsilon * torch.diag(p) - epsilon * torch.outer(p, p)
        y = torch.linalg.solve(matrix, p)
        losses.append(h.logsumexp(dim=0) - (y * h - epsilon * y * (1 - p)).sum())
    return torch.stack(losses)


@settings(max_examples=30, deadline=None)
@given(st.floats(0, 20), st.floats(0.5, 4), st.integers(0, 10_000))
def test_equals_the_linear_system(epsilon: float, temperature: float, seed: int) -> None:
    logits = 3 * torch.randn(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    ours, theirs = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    loss = conjugate_loss(ours, epsilon, temperature)
    torch.testing.assert_close(loss, solved(theirs, epsilon, temperature), rtol=1e-9, atol=1e-10)
    loss.sum().backward()
    solved(theirs, epsilon, temperature).sum().backward()
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-8, atol=1e-9)


def test_a_cross_entropy_source_gives_the_entropy() -> None:
    logits = torch.randn(5, 7, dtype=torch.float64)
    torch.testing.assert_close(conjugate_loss(logits), entropy(logits), rtol=1e-12, atol=1e-12)


def test_extreme_logits_have_a_finite_loss_and_gradient() -> None:
    logits = torch.tensor([[1e4, -1e4, 0.0], [0.0, 0.0, 0.0]], requires_grad=True)
    loss = conjugate_loss(logits, 6.0).sum()
    loss.backward()
    assert loss.isfinite()
    assert logits.grad is not None
    assert logits.grad.isfinite().all()


def test_output_is_the_second_pass() -> None:
    adaptive, images = dpl.adapt(tiny_network(), "cpl", lr=1e-2), stream()[0]
    returned = adaptive(images)
    assert torch.equal(returned, adaptive.predict(images))


def test_batch_of_one() -> None:
    adaptive = dpl.adapt(tiny_network(), "cpl", epsilon=6.0)
    assert adaptive(stream()[0][:1]).isfinite().all()
    assert adaptive.last.updated


def test_a_negative_epsilon_is_refused() -> None:
    with pytest.raises(dpl.SettingError, match="epsilon=-1"):
        conjugate_loss(torch.zeros(1, 2), -1.0)
