"""POEM's own logic: no shift, no bet; interpolation; what it refuses."""

import numpy as np
import pytest
import torch

import dpl
from dpl.core.errors import SettingError
from dpl.methods.poem import interpolate
from parity.tiny import clean_test_images, source_batches, stream, tiny_network

SOURCE = source_batches(torch.float32)[:12]


def test_interpolation_equals_numpys() -> None:
    rng = np.random.default_rng(0)
    places, values, x = np.sort(rng.random(9)), np.sort(rng.random(9)), rng.random(50) * 1.4 - 0.2
    own = interpolate(torch.from_numpy(x), torch.from_numpy(places), torch.from_numpy(values))
    np.testing.assert_allclose(own.numpy(), np.interp(x, places, values), atol=1e-12)


def test_the_wealth_grows_on_a_shifted_stream_and_not_on_source_images() -> None:
    wealth = {}
    for name, images in (
        ("clean", clean_test_images(torch.float32)),
        ("shifted", torch.cat(stream(torch.float32))[:96]),
    ):
        model = dpl.adapt(tiny_network(torch.float32), "poem", source=SOURCE, norm="running", lr=0.0)
        for batch in images.split(32):
            model(batch)
        wealth[name] = float(model.method.log_wealth)
    assert wealth["clean"] < 1
    assert wealth["shifted"] > 5


def test_the_first_images_are_only_predicted() -> None:
    model = dpl.adapt(tiny_network(torch.float32), "poem", source=SOURCE, first_images=40)
    model(stream(torch.float32)[0])
    assert not model.last.updated
    model(stream(torch.float32)[1])
    assert model.last.updated


def test_equal_source_images_are_refused() -> None:
    image, labels = SOURCE[0][0][:1], SOURCE[0][1][:1]
    with pytest.raises(SettingError, match="held-out images"):
        dpl.adapt(tiny_network(torch.float32), "poem", source=[(image, labels)])
