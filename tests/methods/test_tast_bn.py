"""TAST-BN: its vote against a slow loop, the bound on its images, and what it predicts before the first batch."""

import torch

import dpl
from dpl.methods.tast_bn import mean_logits
from parity.tiny import stream, tiny_network


def test_logits_equal_a_slow_loop() -> None:
    generator = torch.Generator().manual_seed(0)
    features, supports = (torch.randn(n, 6, generator=generator, dtype=torch.float64) for n in (3, 5))
    labels = torch.tensor([0, 2, 2, 0, 0])
    logits = mean_logits(features, supports, labels, 4, 10.0)
    for i, z in enumerate(features):
        for k in (0, 2):
            mean = supports[labels == k].mean(dim=0)
            assert torch.isclose(logits[i, k], 10 * torch.cosine_similarity(z, mean, dim=0))
    assert (logits[:, [1, 3]] == 0).all()


def test_first_prediction_is_the_networks_own() -> None:
    images = stream()[0]
    model, norm = dpl.adapt(tiny_network(), "tast_bn"), dpl.adapt(tiny_network(), "norm")
    assert torch.equal(model.predict(images), norm.predict(images))
    model(images)
    assert torch.allclose(model.predict(images).exp().sum(dim=1), torch.ones(32).double())


def test_supports_are_the_surest_images_of_each_class() -> None:
    model = dpl.adapt(tiny_network(), "tast_bn", filter_k=2)
    images = stream()[0]
    logits = dpl.adapt(tiny_network(), "norm")(images)
    p = logits.softmax(1)
    entropies, labels = -(p * p.log()).sum(1), logits.argmax(1)
    model(images)
    wanted = [
        i for k in range(10) for i in sorted((j for j in range(32) if labels[j] == k), key=lambda j: entropies[j])[:2]
    ]
    assert torch.equal(model.method.images, images[wanted])
    assert torch.equal(model.method.labels, labels[wanted])


def test_images_never_exceed_the_capacity() -> None:
    model = dpl.adapt(tiny_network(torch.float32), "tast_bn", filter_k=20, capacity=25)
    few = dpl.adapt(tiny_network(torch.float32), "tast_bn", capacity=4)  # fewer than classes
    for images in stream(torch.float32)[:4]:
        model(images)
        assert few(images).isfinite().all()
        assert model.last.supports <= 20  # two for each class
        assert few.last.supports == 4


def test_affine_parameters_train_and_nothing_else() -> None:
    source, model = tiny_network(), dpl.adapt(tiny_network(), "tast_bn")
    model(stream()[0])
    adapted = dict(model.model.named_parameters())
    moved = {name for name, parameter in source.named_parameters() if not torch.equal(parameter, adapted[name])}
    assert moved == set(model.trainable)
    assert all("bn" in name or "downsample.1" in name for name in moved)


def test_output_after_the_update_differs() -> None:
    before, after = (dpl.adapt(tiny_network(), "tast_bn", output=when) for when in ("before", "after"))
    one, other = before(stream()[0]), after(stream()[0])
    assert not torch.equal(one, other)
    assert torch.allclose(other, before.predict(stream()[0]))
