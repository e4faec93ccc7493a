from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import dpl
from dpl.core.errors import SettingError
from parity.tiny import source_images, stream, tiny_network


def test_fisher_is_the_mean_squared_gradient_of_the_models_own_labels() -> None:
    images, labels = (part[:70] for part in source_images())
    method = dpl.adapt(tiny_network(), "eata", source=(images, labels), fisher_batch=32).method
    network = dpl.adapt(tiny_network(), "tent").method.network  # batch statistics, affine parameters
    expected = 0
    for part in (images[:32], images[32:64], images[64:]):
        logits = network(part).logits
        F.cross_entropy(logits, logits.argmax(dim=1)).backward()
        gradients = [p.grad.flatten() for p in network.module.parameters() if p.grad is not None]
        expected = expected + torch.cat(gradients) ** 2 / 3
        network.module.zero_grad()
    torch.testing.assert_close(method.fisher, expected, rtol=1e-10, atol=1e-20)


def test_only_the_first_source_images_are_used() -> None:
    images, labels = source_images()
    settings = {"fisher_samples": 50, "fisher_batch": 32}
    few = dpl.adapt(tiny_network(), "eata", source=(images[:50], labels[:50]), **settings)
    batches = list(zip(images.split(40), labels.split(40), strict=True))
    many = dpl.adapt(tiny_network(), "eata", source=(images, labels), **settings)
    assert torch.equal(few.method.fisher, many.method.fisher)
    parts = dpl.adapt(tiny_network(), "eata", source=batches, **settings)  # cut into 32, 8 and 10
    assert not torch.equal(few.method.fisher, parts.method.fisher)


def test_the_penalty_is_the_weighted_squared_displacement() -> None:
    adaptive = dpl.adapt(tiny_network(), "eata", source=source_images(), fisher_weight=2e5, fisher_samples=64)
    start = {name: value.detach().clone() for name, value in adaptive.method.trainable.items()}
    adaptive(stream()[0])
    moved = torch.cat([(value - start[name]).flatten() for name, value in adaptive.method.trainable.items()])
    adaptive(stream()[1])
    expected = 2e5 * (adaptive.method.fisher * moved**2).sum()
    assert adaptive.last.penalty > 0
    assert adaptive.last.penalty == pytest.approx(expected.item(), rel=1e-10)


def test_without_weight_it_is_eta_and_needs_no_source() -> None:
    eata, eta = dpl.adapt(tiny_network(), "eata", fisher_weight=0.0), dpl.adapt(tiny_network(), "eta")
    for images in stream()[:3]:
        assert torch.equal(eata(images), eta(images))


def test_missing_source_is_an_error_that_names_eta() -> None:
    with pytest.raises(SettingError, match=r"source=.*'eta'"):
        dpl.adapt(tiny_network(), "eata")


def test_an_empty_source_is_an_error() -> None:
    with pytest.raises(SettingError, match="no batch"):
        dpl.adapt(tiny_network(), "eata", source=[])


def test_fisher_survives_reset_and_a_snapshot_without_the_source(tmp_path: Path) -> None:
    adaptive = dpl.adapt(tiny_network(), "eata", source=source_images(), fisher_weight=2e5, fisher_samples=64)
    adaptive(stream()[0])
    adaptive.save(tmp_path / "snapshot")
    loaded = dpl.load(tmp_path / "snapshot", tiny_network())
    for images in stream()[1:4]:
        assert torch.equal(loaded(images), adaptive(images))
        assert loaded.last.penalty == adaptive.last.penalty > 0
    for model in (loaded, adaptive):
        model.reset()
        assert model.method.fisher.abs().sum() > 0
    assert torch.equal(loaded(stream()[0]), adaptive(stream()[0]))


def test_the_dpl_loss_is_added_on_the_same_pass() -> None:
    settings = {"source": source_images(), "fisher_samples": 64}
    plain = dpl.adapt(tiny_network(), "eata", **settings)
    added = dpl.adapt(tiny_network(), "eata+dpl", **settings)
    assert torch.equal(plain(stream()[0]), added(stream()[0]))
    assert added.last.contrast > 0
    expected = plain.last.loss + added.last.contrast + added.last.regulariser
    assert added.last.loss == pytest.approx(expected, rel=1e-12)
