"""ActMAD's own logic: in-place activations, image size, networks without BatchNorm."""

import pytest
import torch
from torch import nn

import dpl
from dpl.core.errors import InputError, ModelError
from nets import images, network

SOURCE = [(images(8, seed=i), torch.zeros(8, dtype=torch.int64)) for i in range(2)]


def convolutional(inplace: bool) -> nn.Module:
    torch.manual_seed(0)
    body = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace))
    return nn.Sequential(body, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(16, 5)).eval()


def test_an_activation_in_place_changes_nothing() -> None:
    models = [dpl.adapt(convolutional(inplace), "actmad", source=SOURCE) for inplace in (False, True)]
    for seed in range(3):
        plain, in_place = (model(images(8, seed=seed)) for model in models)
        assert torch.equal(plain, in_place)


def test_images_of_another_size_are_refused() -> None:
    model = dpl.adapt(convolutional(inplace=False), "actmad", source=SOURCE)
    with pytest.raises(InputError, match="another size"):
        model(images(8, size=12))


def test_a_network_without_batch_norm_is_refused() -> None:
    with pytest.raises(ModelError, match="try 'tent'"):
        dpl.adapt(network("group"), "actmad", source=SOURCE)


def test_one_image_is_predicted_without_an_update() -> None:
    model = dpl.adapt(convolutional(inplace=False), "actmad", source=SOURCE)
    assert model(images(1)).isfinite().all()
    assert not model.last.updated
