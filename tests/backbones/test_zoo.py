"""`create` and `available` over our own, timm's and torchvision's names."""

import subprocess
import sys

import pytest
import torch

from dpl.backbones import OWN, Normalized, available, create
from dpl.core.errors import DataError, MissingExtraError, SettingError

HALF = [0.5, 0.5, 0.5]
IMAGENET = [0.485, 0.456, 0.406]


def test_the_package_imports_neither_timm_nor_torchvision():
    code = "import dpl.backbones, sys; sys.exit(bool({'timm', 'torchvision'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    ("name", "mean", "pixels"),
    [
        ("resnet18", IMAGENET, 64),
        ("resnet50", IMAGENET, 64),
        ("vit_tiny_patch16_224", HALF, 224),
        ("mixer_s32_224", HALF, 224),
        ("mobilenetv2_100", IMAGENET, 64),
        ("tf_efficientnet_lite0", HALF, 64),
        ("test_vit.r160_in1k", HALF, 160),
    ],
)
def test_timm_networks_carry_their_own_normalisation(name, mean, pixels):
    pytest.importorskip("timm")
    network = create(name, num_classes=7)
    assert isinstance(network, Normalized)
    assert network.mean.flatten().tolist() == pytest.approx(mean)
    assert not network.training
    images = torch.rand(1, 3, pixels, pixels)
    with torch.no_grad():
        logits = network(images)
        assert logits.shape == (1, 7)
        head = network.network.forward_head(network.network.forward_features((images - network.mean) / network.std))
    torch.testing.assert_close(logits, head)


@pytest.mark.parametrize("name", ["vit_base_patch16_224", "mixer_b16_224"])
def test_the_papers_large_networks_have_1000_classes_by_default(name):
    pytest.importorskip("timm")
    with torch.device("meta"):  # shapes only: the values are 86 and 60 million numbers
        network = create(name, normalise="none")
    assert network.get_classifier().weight.shape == (1000, 768)


def test_torchvision_networks_have_a_prefix():
    pytest.importorskip("torchvision")
    network = create("torchvision/mobilenet_v2", num_classes=5)
    assert network.mean.flatten().tolist() == pytest.approx(IMAGENET)
    with torch.no_grad():
        assert network(torch.rand(2, 3, 64, 64)).shape == (2, 5)


def test_available_lists_all_and_obeys_a_pattern():
    pytest.importorskip("timm")
    names = available()
    assert names[: len(OWN)] == list(OWN)
    assert len(names) == len(set(names))
    assert {"resnet18", "resnet50", "vit_base_patch16_224", "torchvision/mobilenet_v2"} <= set(names)
    assert available("cifar_resnet*") == [f"cifar_resnet{depth}" for depth in (20, 32, 44, 56, 110)]


def test_without_the_extras_our_own_remain(monkeypatch):
    def missing(name, extra):
        raise MissingExtraError(f"{name} {extra}")

    monkeypatch.setattr("dpl.backbones.zoo.optional", missing)
    assert available() == list(OWN)
    assert create("debug_cnn") is not None
    with pytest.raises(MissingExtraError, match="timm bench"):
        create("resnet18")
    with pytest.raises(MissingExtraError, match="torchvision"):
        create("torchvision/resnet18")


@pytest.mark.parametrize(
    ("name", "hint"),
    [("wrn28_100", "wrn28_10"), ("resnet5O", "resnet50"), ("torchvision/mobilnet_v2", "torchvision/mobilenet_v2"),
     ("§", "Built in: wrn28_10")],
)  # fmt: skip
def test_an_unknown_name_gets_the_nearest_one(name, hint):
    pytest.importorskip("timm")
    with pytest.raises(SettingError, match=hint):
        create(name)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_classes": 0}, "num_classes=0"),
        ({"pretrained": True}, "never downloaded.*RobustBench.*Standard.pt"),
        ({"pretrained": True, "weights": "x.pt"}, "exclude each other"),
    ],
)
def test_wrong_settings_are_refused(options, message):
    with pytest.raises(SettingError, match=message):
        create("wrn28_10", **options)


def test_torchvision_weights_with_another_head_are_refused():
    pytest.importorskip("torchvision")
    with pytest.raises(SettingError, match="num_classes=5"):
        create("torchvision/mobilenet_v2", num_classes=5, pretrained=True)


def test_weights_are_loaded_strictly(saved):
    torch.manual_seed(0)
    source = create("cifar_resnet20")
    images = torch.rand(2, 3, 32, 32)
    path = saved(source.state_dict())
    assert torch.equal(create("cifar_resnet20", weights=path)(images), source(images))
    with pytest.raises(DataError, match="does not fit"):
        create("cifar_resnet32", weights=path)
