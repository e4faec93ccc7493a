import math

import pytest
import torch

import dpl
from abuse import streams
from dpl.estimate.signals import Accuracies
from dpl.guard.evidence import EstimateTest, Evidence
from parity.tiny import source_images


def test_without_a_difference_the_wealth_of_a_bet_does_not_grow() -> None:
    """The false-alarm rate: fair coins on a third of the images reach 1,000 in far less than one of a hundred runs."""
    generator = torch.Generator().manual_seed(0)
    alarms = 0
    for _ in range(100):
        evidence = Evidence(0.0, 20.0)
        for _ in range(50):
            worth = torch.randint(0, 2, (20,), generator=generator) * 2.0 - 1
            evidence.add(float(worth.sum()) / 60, 20 / 60, 60)
        alarms += evidence.nats >= math.log(1000)
    assert alarms == 0


@pytest.mark.parametrize(("worse", "images"), [(0.5, 100), (0.1, 800), (0.04, 4000)])
def test_a_loss_is_found_the_sooner_the_larger_it_is(worse: float, images: int) -> None:
    evidence, seen = Evidence(0.0, 20.0), 0
    while evidence.nats < math.log(1000):
        evidence.add(worse, worse + 0.05, 50)
        seen += 50
    assert seen <= images


def test_a_gain_ends_harm_and_the_other_way_round() -> None:
    test = EstimateTest(0.0, 0.001)
    for _ in range(20):
        test.add(Accuracies(0.6, 0.9, 0.6), 32)
    assert test.is_worse
    assert not test.shows_gain(0)
    for _ in range(20):
        test.add(Accuracies(0.9, 0.6, 0.6), 32)
    assert test.shows_gain(1)
    assert not test.shows_gain(7)
    assert not test.is_worse
    test.clear()
    assert test.harm.nats == test.gain.nats == 0


def calibrated(method: str) -> dpl.AdaptiveModel:
    images, labels = source_images(torch.float32)
    known = (images[:400], labels[:400])
    return dpl.adapt(streams.network(), method, guard=True, calibrate=known, layout="as_is")


def accuracy(model: dpl.AdaptiveModel, batches: list[streams.Batch]) -> float:
    right = torch.cat([model(images).argmax(dim=1) == labels for images, labels in batches])
    return float(right.double().mean())


def test_with_labelled_data_the_gain_comes_back_after_a_freeze() -> None:
    model = calibrated("tent")
    accuracy(model, streams.one_class("noise", 96))
    assert model.guard.frozen
    shifted = streams.iid("shifted", 32 * 60)
    accuracy(model, shifted[:40])
    assert not model.guard.frozen, "without the estimate a freeze lasts at least 2,048 images"
    with torch.no_grad():
        source = torch.cat([streams.network()(images).argmax(dim=1) == labels for images, labels in shifted[40:]])
    assert accuracy(model, shifted[40:]) > float(source.double().mean()) + 0.1


def test_a_guarded_model_with_labelled_data_resumes_exactly() -> None:
    model, twin = calibrated("tent"), calibrated("tent")
    batches = streams.one_class("noise", 96) + streams.iid("shifted", 32 * 8)
    for images, _ in batches[:6]:
        model(images)
    twin.load_state_dict(model.state_dict())
    for images, _ in batches[6:]:
        assert torch.equal(model(images), twin(images))
    assert model.estimate() == twin.estimate()
