"""SHOT-IM: its loss, what trains, and statistics that follow the stream."""

import math

import pytest
import torch

import dpl
from parity.tiny import stream, tiny_network


def information(logits: torch.Tensor) -> float:
    """The loss with loops."""
    p = logits.softmax(dim=1).tolist()
    entropy = -sum(v * math.log(v) for row in p for v in row) / len(p)
    mean = [sum(row[c] for row in p) / len(p) for c in range(len(p[0]))]
    return entropy + sum(q * math.log(q + 1e-5) for q in mean)


def test_loss_equals_the_formula() -> None:
    adaptive = dpl.adapt(tiny_network(), "shot_im")
    logits = adaptive(stream()[0])
    assert adaptive.last.loss == pytest.approx(information(logits), abs=1e-12)


def test_classifier_is_frozen_and_features_move() -> None:
    network = tiny_network()
    adaptive = dpl.adapt(network, "shot_im")
    adaptive(stream()[0])
    moved = {k for k, v in adaptive.model.named_parameters() if not torch.equal(v, network.get_parameter(k))}
    assert moved == {k for k, _ in network.named_parameters() if not k.startswith("fc.")}


def test_one_image_changes_nothing() -> None:
    adaptive = dpl.adapt(tiny_network(), "shot_im")
    before = adaptive.state_dict()
    adaptive(stream()[0][:1])
    assert not adaptive.last.updated
    assert all(torch.equal(value, before[key]) for key, value in adaptive.state_dict().items())


def test_tracked_statistics_move_with_a_step_and_stay_with_a_prediction() -> None:
    network, images = tiny_network(), stream()[0]
    adaptive = dpl.adapt(network, "shot_im", norm="track")
    before = adaptive.state_dict()
    predicted = adaptive.predict(images)
    assert all(torch.equal(value, before[key]) for key, value in adaptive.state_dict().items())
    assert torch.equal(adaptive(images), predicted)  # both by the batch's statistics, before the update
    first = adaptive.model.bn1
    x = network.conv1((images - 0.5) / 0.25)
    torch.testing.assert_close(first.running_mean, 0.9 * network.bn1.running_mean + 0.1 * x.mean(dim=(0, 2, 3)))
    torch.testing.assert_close(first.running_var, 0.9 * network.bn1.running_var + 0.1 * x.var(dim=(0, 2, 3)))


def test_unknown_statistics_are_refused_by_name() -> None:
    with pytest.raises(dpl.SettingError, match="'track'"):
        dpl.adapt(tiny_network(), "shot_im", norm="tracked")
