"""ArcFace on confident pseudo-labels."""

import itertools
import math

import pytest
import torch
from torch import Tensor

import dpl
from dpl.objectives import confident_cross_entropy
from dpl.objectives.proxy import arcface
from parity.tiny import stream, tiny_network


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def with_loops(features: Tensor, prototypes: Tensor, labels: Tensor, scale: float, margin: float) -> float:
    losses = []
    for z, label in zip(features, labels.tolist(), strict=True):
        if label < 0:
            continue
        angles = [math.acos(float(z @ w / (z.norm() * w.norm()))) for w in prototypes]
        exponents = [scale * math.cos(angle + (margin if k == label else 0)) for k, angle in enumerate(angles)]
        losses.append(math.log(sum(math.exp(e) for e in exponents)) - exponents[label])
    return sum(losses) / len(losses)


@pytest.mark.parametrize("margin", [0.0, 0.4])
def test_equals_the_formula_with_loops(margin: float) -> None:
    features, prototypes = torch.randn(6, 8, dtype=torch.float64), torch.randn(4, 8, dtype=torch.float64)
    labels = torch.tensor([0, 3, -1, 1, 1, -1])
    expected = with_loops(features, prototypes, labels, 5.0, margin)
    assert arcface(features, prototypes, labels, 5.0, margin).item() == pytest.approx(expected, abs=1e-10)


def test_the_loss_grows_with_the_angle_even_where_the_margin_passes_pi() -> None:
    prototypes = torch.tensor([[1.0, 0.0, 0.0], [0.0, 0.0, 1.0]], dtype=torch.float64)
    angles = torch.linspace(0.01, math.pi - 0.01, 60, dtype=torch.float64)  # to the first; the second stays at pi / 2
    features = torch.stack([angles.cos(), angles.sin(), torch.zeros_like(angles)], dim=1)
    label = torch.tensor([0])
    losses = [arcface(z[None], prototypes, label, 4.0, 0.5).item() for z in features]
    assert losses == sorted(losses)
    assert all(a < b for a, b in itertools.pairwise(losses))


def test_gradient_is_finite_at_the_prototype_itself() -> None:
    features = torch.eye(3)[:1].clone().requires_grad_()
    arcface(features, torch.eye(3), torch.tensor([0]), 64.0, 0.5).backward()
    assert features.grad is not None
    assert features.grad.isfinite().all()


def test_lengths_do_not_matter() -> None:
    features, prototypes, labels = torch.randn(5, 6), torch.randn(3, 6), torch.tensor([0, 1, 2, 0, 1])
    ours = arcface(features, prototypes, labels, 64.0)
    torch.testing.assert_close(arcface(7 * features, prototypes * torch.rand(3, 1).add(0.1), labels, 64.0), ours)


def test_method_uses_the_confident_and_keeps_ordinary_logits() -> None:
    network, images = tiny_network(), stream()[0]
    adaptive = dpl.adapt(network, "arcface", scale=10.0)
    logits = adaptive(images)
    assert torch.equal(logits, dpl.adapt(network, "source")(images))
    p, labels = logits.softmax(dim=1).max(dim=1)
    labels = torch.where(p > 0.9, labels, -1)
    with torch.no_grad():
        out = dpl.network.Network(network)(images)
        cosines = torch.nn.functional.normalize(out.z) @ torch.nn.functional.normalize(network.fc.weight).T
    assert adaptive.last.loss == pytest.approx(confident_cross_entropy(10 * cosines, labels).item(), abs=1e-10)


def test_nothing_confident_changes_nothing() -> None:
    adaptive = dpl.adapt(tiny_network(), "arcface", confidence=1.0)
    adaptive(stream()[0])
    assert not adaptive.last.updated


def test_wrong_shapes_are_named() -> None:
    with pytest.raises(dpl.InputError, match=r"\(2, 3\) and \(4, 5\)"):
        arcface(torch.zeros(2, 3), torch.zeros(4, 5), torch.zeros(2, dtype=torch.int64), 64.0)
