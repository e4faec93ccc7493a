"""SoTTA's own logic: what enters the bank, when it learns, what stays untouched."""

import torch

import dpl
from parity.tiny import stream, tiny_network

IMAGES = torch.cat(stream(torch.float32))


def test_only_confident_samples_enter_the_bank() -> None:
    model = dpl.adapt(tiny_network(torch.float32), "sotta", confidence=0.9)
    expected = int((model.predict(IMAGES[:32]).softmax(dim=1).max(dim=1).values >= 0.9).sum())
    model(IMAGES[:32])
    assert 0 < expected < 32
    assert int((model.state_dict()["method.labels"] >= 0).sum()) == expected


def test_without_a_confident_sample_nothing_changes() -> None:
    model = dpl.adapt(tiny_network(torch.float32), "sotta", confidence=1.0, update_every=8)
    before = {key: value.clone() for key, value in model.model.state_dict().items()}
    model(0.5 + 0.01 * IMAGES[:8])
    assert not model.last.updated
    assert "confident" in model.last.reason
    assert all(torch.equal(value, before[key]) for key, value in model.model.state_dict().items())


def test_the_top_stays_and_the_statistics_move() -> None:
    model, source = dpl.adapt(tiny_network(torch.float32), "sotta", confidence=0.5), tiny_network(torch.float32)
    model(IMAGES[:64])
    assert model.last.updated
    assert torch.equal(model.model.layer4[0].bn1.weight, source.layer4[0].bn1.weight)
    assert not torch.equal(model.model.layer4[0].bn1.running_mean, source.layer4[0].bn1.running_mean)
    assert not torch.equal(model.model.bn1.weight, source.bn1.weight)
