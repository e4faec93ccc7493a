"""MEMO's own logic: images do not influence each other, nothing is carried on; its view."""

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps

import dpl
from dpl.views import memo_view, seeded
from dpl.views.augmix import autocontrast, equalize
from parity.tiny import stream, tiny_network

IMAGES = stream(torch.float32)[0][:4]


@pytest.mark.parametrize("norm", ["running", 1 / 17])
def test_an_image_is_predicted_alike_alone_and_in_a_batch(norm: str | float) -> None:
    together, alone = (
        dpl.adapt(tiny_network(torch.float32), "memo", views=4, norm=norm, augment=torch.clone) for _ in range(2)
    )
    assert torch.allclose(together(IMAGES), torch.cat([alone(image) for image in IMAGES.split(1)]), atol=1e-5)
    assert torch.allclose(together.predict(IMAGES), torch.cat([alone.predict(i) for i in IMAGES.split(1)]), atol=1e-5)


def test_the_weights_are_the_sources_after_each_batch() -> None:
    model, source = dpl.adapt(tiny_network(torch.float32), "memo", views=4), tiny_network(torch.float32)
    adapted = model(IMAGES)
    assert model.last.updated
    assert all(torch.equal(a, b) for a, b in zip(model.model.parameters(), source.parameters(), strict=True))
    with torch.no_grad():
        assert not torch.allclose(adapted, source(IMAGES), atol=1e-4)


def test_views_of_one_image_differ_and_stay_near_it() -> None:
    image = stream(torch.float32)[0][:1]
    views = seeded(memo_view(), 0)(image.expand(64, -1, -1, -1))
    assert views.shape == (64, *image.shape[1:])
    assert views.min() >= 0
    assert views.max() <= 1
    assert len(views.flatten(1).unique(dim=0)) > 60


def test_histograms_are_pils() -> None:
    rng = np.random.default_rng(0)
    pixels = (rng.random((16, 16, 3)) ** 2 * 200 + 20).astype(np.uint8)
    batch = torch.from_numpy(pixels).permute(2, 0, 1)[None] / 255.0
    for ours, theirs in ((equalize, ImageOps.equalize), (autocontrast, ImageOps.autocontrast)):
        expected = np.asarray(theirs(Image.fromarray(pixels)), dtype=np.float64)
        own = ours(batch)[0].permute(1, 2, 0).numpy() * 255
        assert np.abs(own - expected).max() <= 1
