"""Training with true labels: both losses learn, the DPL loss is Eq. 7, a stopped run resumes exactly."""

import json
import math
from importlib.util import find_spec

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from data.make import make_cifar
from dpl.backbones import create
from dpl.core.errors import DataError, SettingError
from dpl.training import supervised
from dpl.training.supervised import SupervisedSpec, train_supervised


@pytest.fixture(scope="module")
def cifar(tmp_path_factory):
    root = tmp_path_factory.mktemp("supervised")
    make_cifar(root, split="train", count=300)
    return make_cifar(root, split="test", count=100, seed=1)


pytestmark = pytest.mark.filterwarnings("ignore::dpl.data.DataWarning")


def quick(**changed):
    return SupervisedSpec(
        **({"loss": "ce", "network": "debug_cnn", "epochs": 3, "batch_size": 50, "lr": 0.05} | changed)
    )


def images_of(folder):
    """Return how many images trained and tested."""
    data = json.loads((folder / "train.json").read_text())["data"]
    return data["training"], data["test"]


@pytest.mark.parametrize("loss", ["ce", "dpl"])
def test_both_losses_learn(cifar, tmp_path, loss):
    first, *_, last = train_supervised(quick(loss=loss, epochs=6), data=cifar, out=tmp_path)
    assert images_of(tmp_path) == (300, 100)
    assert last["loss"] < first["loss"]
    assert last["cosine_accuracy"] > 30  # chance is 10
    result = json.loads((tmp_path / "train.json").read_text())["result"]
    assert result["accuracy"] == last["accuracy"]


@pytest.mark.parametrize("loss", ["ce", "dpl"])
def test_a_stopped_run_ends_with_the_same_weights(cifar, tmp_path, loss):
    spec = quick(loss=loss)
    whole = train_supervised(spec, data=cifar, out=tmp_path / "whole")

    class Stop(Exception):
        pass

    def stop(report):
        raise Stop

    with pytest.raises(Stop):
        train_supervised(spec, data=cifar, out=tmp_path / "parts", on_epoch=stop)
    seen = []
    parts = train_supervised(spec, data=cifar, out=tmp_path / "parts", on_epoch=seen.append)
    assert [entry["epoch"] for entry in seen] == [1, 2]
    assert [entry["loss"] for entry in parts] == [entry["loss"] for entry in whole]
    first, second = (load_file(tmp_path / name / "best.safetensors") for name in ("whole", "parts"))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_a_finished_run_is_not_run_again(cifar, tmp_path):
    first = train_supervised(quick(epochs=1), data=cifar, out=tmp_path)
    again = train_supervised(quick(epochs=1), data=cifar, out=tmp_path, on_epoch=lambda _: pytest.fail("ran again"))
    assert again == first


def test_a_folder_of_other_settings_is_refused(cifar, tmp_path):
    train_supervised(quick(epochs=1), data=cifar, out=tmp_path)
    with pytest.raises(SettingError, match="holds a run with loss='ce'"):
        train_supervised(quick(epochs=1, loss="dpl"), data=cifar, out=tmp_path)


def test_the_dpl_loss_is_equation_7_with_every_sample_confident():
    spec = quick(loss="dpl", temperature=0.2, memory_momentum=0.7, reg_weight=0.5)
    trainer = supervised.SupervisedTrainer(spec, 4, torch.device("cpu"))
    trainer.network.eval()
    images, labels = torch.rand(6, 3, 32, 32), torch.tensor([0, 1, 1, 2, 0, 2])
    before, w = trainer.memory.clone(), trainer.head.weight.detach()
    with torch.no_grad():
        _, z = trainer._forward(images)
        found = trainer._loss(images, labels).item()

    def similar(a, b):
        return math.exp(float(torch.cosine_similarity(a, b, dim=0)) / 0.2)

    contrast = 0.0
    for k in (0, 1, 2):  # Eq. 4, the classes that are present
        every = [similar(w[k], z[i]) for i in range(6)]
        contrast -= math.log(sum(every[i] for i in range(6) if labels[i] == k) / sum(every)) / 3
    memory = before.clone()
    for k in (0, 1, 2):  # Eq. 5
        memory[k] = 0.7 * before[k] + 0.3 * z[labels == k].mean(dim=0)
    ratios = [similar(w[k], memory[k]) / sum(similar(w[k], memory[c]) for c in range(4)) for k in range(4)]
    assert found == pytest.approx(contrast - 0.5 * sum(map(math.log, ratios)) / 4, rel=1e-5)
    torch.testing.assert_close(trainer.memory, memory)


def test_augmentation_moves_and_flips_but_invents_nothing():
    pixels = torch.arange(1, 3 * 8 * 8 + 1, dtype=torch.uint8).reshape(1, 3, 8, 8).expand(200, 3, 8, 8)
    torch.manual_seed(0)
    made = (supervised._augmented(pixels) * 255).round().to(torch.uint8)
    assert made.shape == pixels.shape
    padded = nn.functional.pad(pixels[0], (4, 4, 4, 4))
    cuts = {
        cut.numpy().tobytes()
        for top in range(9)
        for left in range(9)
        for window in [padded[:, top : top + 8, left : left + 8]]
        for cut in (window.contiguous(), window.flip(2).contiguous())
    }
    seen = {image.contiguous().numpy().tobytes() for image in made}
    assert seen <= cuts
    assert len(seen) > 100  # of 162


@pytest.mark.skipif(find_spec("timm") is None, reason="timm is not installed")
def test_a_stem_for_large_images_is_replaced():
    network = supervised._for_small_images(create("resnet18", num_classes=10))
    shapes = []
    network.network.layer1.register_forward_hook(lambda _layer, _inputs, output: shapes.append(output.shape))
    network(torch.rand(2, 3, 32, 32))
    assert shapes == [(2, 64, 32, 32)]
    small = create("debug_cnn")
    assert supervised._for_small_images(small) is small


def test_limit_takes_fewer_images(cifar, tmp_path):
    train_supervised(quick(epochs=1, limit=60), data=cifar, out=tmp_path)
    assert images_of(tmp_path) == (60, 60)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"loss": "cee"}, "expected one of 'ce', 'dpl'"),
        ({"epochs": 0}, "epochs"),
        ({"lr": 0}, "lr=0"),
        ({"batch_size": 1}, "batch_size"),
    ],
)
def test_wrong_settings_are_refused(change, told):
    with pytest.raises(SettingError, match=told):
        quick(**change)


def test_missing_training_images_are_told(tmp_path):
    make_cifar(tmp_path, split="test", count=20)
    with pytest.raises(DataError, match=r"CIFAR-10 \(train\) was not found"):
        train_supervised(quick(), data=tmp_path, out=tmp_path / "out")
