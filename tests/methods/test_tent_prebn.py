"""Tent-BN: a normalisation layer before the classifier, and nothing else, learns."""

import pytest
import torch

import dpl
from parity.tiny import stream, tiny_network


def test_first_prediction_normalises_the_features() -> None:
    network, images = tiny_network(), stream()[0]
    z = dpl.network.Network(network)(images).z
    expected = network.fc((z - z.mean(dim=0)) / (z.var(dim=0, correction=0) + 1e-5).sqrt())
    torch.testing.assert_close(dpl.adapt(network, "tent_prebn")(images), expected, rtol=1e-10, atol=1e-10)


def test_the_network_stays_and_the_layer_learns() -> None:
    network = tiny_network()
    adaptive = dpl.adapt(network, "tent_prebn", lr=1e-2)
    losses = []
    for _ in range(5):
        adaptive(stream()[0])
        losses.append(adaptive.last.loss)
    assert adaptive.trainable == ["prebn.weight", "prebn.bias"]
    assert losses == sorted(losses, reverse=True)
    assert all(torch.equal(v, network.state_dict()[k]) for k, v in adaptive.model.state_dict().items())
    adaptive.reset()
    assert torch.equal(adaptive.method.prebn.weight, torch.ones(32, dtype=torch.float64))


def test_one_image_is_predicted_by_the_network_as_it_is() -> None:
    network, images = tiny_network(), stream()[0][:1]
    adaptive = dpl.adapt(network, "tent_prebn", lr=1e-2)
    adaptive(stream()[1])
    assert torch.equal(adaptive(images), network(images).detach())
    assert not adaptive.last.updated


def test_after_predicts_with_the_updated_layer() -> None:
    adaptive, images = dpl.adapt(tiny_network(), "tent_prebn", lr=1e-2, output="after"), stream()[0]
    assert torch.equal(adaptive(images), adaptive.predict(images))


def test_another_scope_is_refused() -> None:
    with pytest.raises(dpl.SettingError, match="scope='all'"):
        dpl.adapt(tiny_network(), "tent_prebn", scope="all")
