"""DomainAdaptor: mixed statistics, generalised entropy, one batch at a time."""

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import dpl
from dpl.methods.parts.adamix import AdaMix, Moments, source_share
from dpl.network import Network
from dpl.objectives import gem_skd, gem_t
from parity.tiny import stream, tiny_network


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def share_with_loops(x: Tensor, layer: nn.BatchNorm2d) -> float:
    def distance(mean_a: Tensor, deviation_a: Tensor, mean_b: Tensor, deviation_b: Tensor) -> float:
        channels = range(len(mean_a))
        return sum(
            float((mean_a[c] - mean_b[c]) ** 2 + (deviation_a[c] - deviation_b[c]) ** 2) for c in channels
        ) / len(mean_a)

    source = layer.running_mean, layer.running_var.sqrt()
    batch = x.mean(dim=(0, 2, 3)), x.std(dim=(0, 2, 3))
    shares = []
    for image in x:
        own = image.mean(dim=(1, 2)), image.std(dim=(1, 2))
        between = distance(*batch, *source)
        shares.append(1 - between / (between + distance(*own, *source) + distance(*own, *batch)))
    return sum(min(max(share, 0), 1) for share in shares) / len(shares)


@pytest.fixture
def layer() -> nn.BatchNorm2d:
    layer = nn.BatchNorm2d(5).double().eval()
    layer.running_mean.normal_()
    layer.running_var.uniform_(0.5, 2)
    nn.init.normal_(layer.weight)
    nn.init.normal_(layer.bias)
    return layer


def test_share_equals_the_formula_with_loops(layer: nn.BatchNorm2d) -> None:
    x = 2 * torch.randn(6, 5, 3, 4, dtype=torch.float64) + 1
    batch = Moments(x.mean(dim=(0, 2, 3)), x.var(dim=(0, 2, 3)))
    ours = source_share(x, Moments(layer.running_mean, layer.running_var), batch)
    assert ours.item() == pytest.approx(share_with_loops(x, layer), abs=1e-12)


def test_rectified_affine_equals_mixed_statistics(layer: nn.BatchNorm2d) -> None:
    x = 2 * torch.randn(6, 5, 3, 4, dtype=torch.float64) + 1
    share = share_with_loops(x, layer)
    mean = share * layer.running_mean + (1 - share) * x.mean(dim=(0, 2, 3))
    variance = share * layer.running_var + (1 - share) * x.var(dim=(0, 2, 3))
    expected = nn.functional.batch_norm(x, mean, variance, layer.weight, layer.bias)
    network = Network(layer)
    with network.norm.using(AdaMix()):
        torch.testing.assert_close(network.module(x), expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("affine", [True, False])
def test_layers_over_vectors(affine: bool) -> None:
    network, x = Network(nn.BatchNorm1d(4, affine=affine)), torch.randn(8, 4)
    with network.norm.using(AdaMix()):
        assert network.module(x).isfinite().all()
        assert network.module(x[:1]).isfinite().all()


def test_gem_losses_equal_loops() -> None:
    logits = torch.randn(5, 4, dtype=torch.float64)
    for i, row in enumerate(logits):
        h = row - row.mean()
        t = 2 * h.std()
        p = (h / t).softmax(dim=0)
        assert gem_t(logits)[i].item() == pytest.approx(-(t**2 * (p * p.log()).sum()).item(), abs=1e-12)
        expected = -(t**2 * (h.softmax(dim=0) * p.log()).sum()).item()
        assert gem_skd(logits)[i].item() == pytest.approx(expected, abs=1e-12)


def test_shared_weight_is_the_mean_of_the_batch() -> None:
    logits = torch.randn(5, 4, dtype=torch.float64)
    squared = 4 * logits.var(dim=1)
    unweighted = gem_t(logits) / squared
    torch.testing.assert_close(gem_t(logits, shared_weight=True), unweighted * squared.mean())


@pytest.mark.parametrize("loss", [gem_t, gem_skd])
def test_equal_logits_have_a_finite_gradient(loss: object) -> None:
    logits = torch.zeros(2, 3, requires_grad=True)
    loss(logits).sum().backward()  # type: ignore[operator]
    assert logits.grad is not None
    assert logits.grad.isfinite().all()


@pytest.mark.parametrize("settings", [{}, {"optimizer": "adam", "steps": 3}, {"scope": "all"}])
def test_a_batch_leaves_nothing_behind(settings: dict[str, object]) -> None:
    adaptive, batches = dpl.adapt(tiny_network(), "domainadaptor", lr=1e-2, **settings), stream()[:3]
    before = adaptive.state_dict()
    first = [adaptive(images) for images in batches]
    after = adaptive.state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(value, before[key]) for key, value in after.items())
    again = [adaptive(images) for images in reversed(batches)]
    assert all(torch.equal(a, b) for a, b in zip(first, reversed(again), strict=True))


def test_prediction_without_a_step_mixes_statistics_only() -> None:
    adaptive, images = dpl.adapt(tiny_network(), "domainadaptor", output="before"), stream()[0]
    assert torch.equal(adaptive.predict(images), adaptive(images))
    assert not torch.equal(adaptive.predict(images), dpl.adapt(tiny_network(), "source")(images))


def test_online_carries_the_update_and_not_the_rectification() -> None:
    network = tiny_network()
    ours = dpl.adapt(network, "domainadaptor", online=True)
    theirs = dpl.adapt(network, "domainadaptor", online=True, authors=True)
    for images in stream():
        ours(images), theirs(images)
    moved = [_largest_move(adaptive, network) for adaptive in (ours, theirs)]
    assert 0 < moved[0] < 0.1 < 1 < moved[1]


def _largest_move(adaptive: dpl.AdaptiveModel, network: nn.Module) -> float:
    moves = [(p - network.get_parameter(name)).abs().max().item() for name, p in adaptive.model.named_parameters()]
    return float(np.max(moves))


def test_other_statistics_are_refused() -> None:
    with pytest.raises(dpl.SettingError, match="norm='batch'"):
        dpl.adapt(tiny_network(), "domainadaptor", norm="batch")
