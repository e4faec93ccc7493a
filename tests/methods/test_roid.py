import math

import pytest
import torch
from torch import Tensor

import dpl
from parity.tiny import stream, tiny_network


def slow_weights(p: list[list[float]], temperature: float) -> list[float]:
    """Certainty times diversity from a uniform average, sample by sample."""
    classes = len(p[0])
    diversity = [1 - sum(q) / math.sqrt(classes) / math.hypot(*q) for q in p]
    certainty = [sum(x * math.log(x) for x in q) for q in p]
    d = [(x - min(diversity)) / (max(diversity) - min(diversity)) for x in diversity]
    c = [(x - min(certainty)) / (max(certainty) - min(certainty)) for x in certainty]
    mean = sum(d) / len(d)
    return [0.0 if x < mean else math.exp(x * y / temperature) for x, y in zip(d, c, strict=True)]


def slow_ratio(p: list[float]) -> float:
    return -sum(min(x, 0.99) * math.log(min(x, 0.99) / (1 - min(x, 0.99)) + 1e-5) for x in p)


def test_first_loss_equals_a_slow_loop() -> None:
    adaptive = dpl.adapt(tiny_network(), "roid", consistency=False, temperature=0.5)
    images = stream()[0][:20]
    p = dpl.adapt(tiny_network(), "norm")(images).softmax(dim=1).tolist()
    adaptive(images)
    expected = sum(w * slow_ratio(q) for w, q in zip(slow_weights(p, 0.5), p, strict=True)) / 20
    assert adaptive.last.loss == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("images", [torch.rand(1, 3, 16, 16), torch.full((5, 3, 16, 16), 0.5)])
def test_equal_scores_get_weight_one(images: Tensor) -> None:
    adaptive = dpl.adapt(tiny_network(torch.float32), "roid")
    for _ in range(3):
        assert adaptive(images).isfinite().all()
        assert adaptive.last.selected == 1
        assert adaptive.last.updated
    assert all(value.isfinite().all() for value in adaptive.model.state_dict().values())
    assert adaptive.method.average.isfinite().all()


def test_weights_are_averaged_with_the_source() -> None:
    images = stream()[0]
    source = tiny_network().state_dict()
    steps = {}
    for keep in (1.0, 0.75, 0.0):
        adaptive = dpl.adapt(tiny_network(), "roid", augment=torch.clone, weight_momentum=keep)
        adaptive(images)
        steps[keep] = adaptive.model.bn1.weight.detach() - source["bn1.weight"]
    assert steps[1.0].abs().min() > 0
    torch.testing.assert_close(steps[0.75], 0.75 * steps[1.0])
    assert steps[0.0].abs().max() < 1e-15


def test_the_prior_multiplies_what_the_setting_says() -> None:
    images = stream()[0]
    plain = dpl.adapt(tiny_network(), "roid", prior="off").predict(images)
    mean = plain.softmax(dim=1).mean(dim=0)
    smooth = (1 / 10) / mean.max()
    prior = (mean + smooth) / (1 + 10 * smooth)
    torch.testing.assert_close(dpl.adapt(tiny_network(), "roid")(images), plain * prior)
    posterior = dpl.adapt(tiny_network(), "roid", prior="posterior")(images)
    expected = plain.softmax(dim=1) * prior
    torch.testing.assert_close(posterior.softmax(dim=1), expected / expected.sum(dim=1, keepdim=True))


@pytest.mark.parametrize("output", ["before", "after"])
def test_output_and_prediction_are_corrected_alike(output: str) -> None:
    adaptive = dpl.adapt(tiny_network(), "roid", output=output)
    first = adaptive.predict(stream()[0])
    logits = adaptive(stream()[0])
    expected = first if output == "before" else adaptive.predict(stream()[0])
    assert torch.equal(logits, expected)


def test_views_come_from_the_methods_own_generator() -> None:
    first, second, other = (dpl.adapt(tiny_network(), "roid", seed=seed) for seed in (0, 0, 1))
    torch.manual_seed(1)
    before = torch.get_rng_state()
    for images in stream()[:2]:
        first(images)
    assert torch.equal(before, torch.get_rng_state())
    torch.manual_seed(2)
    for images in stream()[:2]:
        second(images)
        other(images)
    assert torch.equal(first.model.bn1.weight, second.model.bn1.weight)
    assert not torch.equal(first.model.bn1.weight, other.model.bn1.weight)
