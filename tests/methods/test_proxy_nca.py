"""Proxy-NCA on confident pseudo-labels."""

import math

import pytest
import torch

import dpl
from dpl.objectives.proxy import proxy_nca
from parity.tiny import stream, tiny_network


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("scale", [1.0, 3.0])
def test_equals_the_formula_with_loops(scale: float) -> None:
    features, prototypes = torch.randn(6, 8, dtype=torch.float64), torch.randn(4, 8, dtype=torch.float64)
    labels, losses = torch.tensor([0, 3, -1, 1, 1, -1]), []
    for z, label in zip(features, labels.tolist(), strict=True):
        distances = [float((z / z.norm() - w / w.norm()).square().sum()) for w in prototypes]
        others = sum(math.exp(-scale * d) for k, d in enumerate(distances) if k != label)
        if label >= 0:
            losses.append(-math.log(math.exp(-scale * distances[label]) / others))
    expected = sum(losses) / len(losses)
    assert proxy_nca(features, prototypes, labels, scale).item() == pytest.approx(expected, abs=1e-10)


def test_no_label_gives_zero_loss_and_gradient() -> None:
    features = torch.randn(3, 4, requires_grad=True)
    loss = proxy_nca(features, torch.randn(5, 4), torch.full((3,), -1))
    loss.backward()
    assert loss.item() == 0
    assert features.grad is not None
    assert (features.grad == 0).all()


def test_one_class_is_refused() -> None:
    with pytest.raises(dpl.InputError, match="at least two classes"):
        proxy_nca(torch.zeros(1, 4), torch.zeros(1, 4), torch.tensor([0]))


def test_method_pulls_the_confident_to_their_prototypes() -> None:
    adaptive, images = dpl.adapt(tiny_network(), "proxy_nca", lr=1e-4, steps=5), stream()[0]
    adaptive(images)
    first = dpl.adapt(tiny_network(), "proxy_nca")
    first(images)
    assert adaptive.last.updated
    assert adaptive.last.loss < first.last.loss
    assert set(adaptive.trainable) == {name for name, _ in adaptive.model.named_parameters()}


def test_nothing_confident_changes_nothing() -> None:
    adaptive = dpl.adapt(tiny_network(), "proxy_nca", confidence=1.0)
    before = adaptive.state_dict()
    adaptive(stream()[0])
    assert not adaptive.last.updated
    assert all(torch.equal(value, before[key]) for key, value in adaptive.state_dict().items())
