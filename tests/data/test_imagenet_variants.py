"""ImageNet-R, -A, -V2, -Sketch and CIFAR-10.1: labels, and the network's outputs that belong to them."""

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from dpl.backbones import create, keep_classes
from dpl.bench.context import BenchContext
from dpl.bench.run import run_unit
from dpl.bench.unit import Unit, resolved_settings
from dpl.core.errors import DataError, SettingError
from dpl.core.extras import optional
from dpl.data import open_benchmark

pytestmark = pytest.mark.filterwarnings("ignore::dpl.data.DataWarning")


def wordnet_ids() -> list[str]:
    return optional("timm.data", "bench").ImageNetInfo().label_names()


def make_folders(root, names):
    for name in names:
        (root / name).mkdir(parents=True)
        Image.new("RGB", (8, 8)).save(root / name / "a.png")


@pytest.mark.parametrize("name", ["imagenet_r", "imagenet_a"])
def test_two_hundred_classes_know_their_outputs(tmp_path, name):
    ids = wordnet_ids()
    make_folders(tmp_path / name.replace("_", "-"), ids[::5])
    benchmark = open_benchmark(name, tmp_path)
    assert len(benchmark["test"]) == len(benchmark.classes) == 200
    assert benchmark.outputs == tuple(ids.index(folder) for folder in benchmark.classes)
    assert benchmark["test"].labels.tolist() == list(range(200))


def test_sketch_has_all_classes(tmp_path):
    make_folders(tmp_path / "sketch", wordnet_ids())
    benchmark = open_benchmark("imagenet_sketch", tmp_path)
    assert benchmark.outputs == tuple(range(1000))


def test_v2_has_folders_by_number(tmp_path):
    make_folders(tmp_path / "imagenetv2-matched-frequency-format-val", map(str, range(1000)))
    benchmark = open_benchmark("imagenet_v2", tmp_path)
    assert benchmark.outputs == tuple(range(1000))
    assert benchmark.classes[11] == "11"


def test_a_missing_class_is_refused(tmp_path):
    make_folders(tmp_path / "imagenet-r", wordnet_ids()[:199])
    with pytest.raises(DataError, match="199 class folders; ImageNet-R has 200"):
        open_benchmark("imagenet_r", tmp_path)


def test_unknown_ids_are_named(tmp_path):
    make_folders(tmp_path / "imagenet-r", [f"n9{number:07d}" for number in range(200)])
    with pytest.raises(DataError, match=r"200 folders are not among the 1,000 classes .* n90000000"):
        open_benchmark("imagenet_r", tmp_path)


def test_cifar10_1(tmp_path):
    folder = tmp_path / "CIFAR-10.1"
    folder.mkdir()
    np.save(folder / "cifar10.1_v6_data.npy", np.zeros((12, 32, 32, 3), dtype=np.uint8))
    with pytest.raises(DataError, match=r"labels\.npy is missing"):
        open_benchmark("cifar10_1", tmp_path)
    np.save(folder / "cifar10.1_v6_labels.npy", np.arange(12, dtype=np.int32) % 10)
    images = open_benchmark("cifar10_1", tmp_path)["test"]
    assert images.labels.tolist() == [*range(10), 0, 1]
    assert images.classes[3] == "cat"


def test_kept_classes_have_the_outputs_of_the_whole_network():
    torch.manual_seed(0)
    network, images = create("debug_cnn", num_classes=9), torch.rand(4, 3, 32, 32)
    whole = network(images)
    torch.testing.assert_close(keep_classes(network, [7, 2, 3])(images), whole[:, [7, 2, 3]])
    with pytest.raises(SettingError, match="from 0 to 2"):
        keep_classes(network, [0, 3])


def test_benchmark_runs_on_the_kept_classes(tmp_path):
    make_folders(tmp_path / "imagenet-r", wordnet_ids()[::5])
    save_file(create("resnet18").network.state_dict(), tmp_path / "w.safetensors")
    settings = resolved_settings("norm", {})
    unit = Unit(dataset="imagenet_r", domains=("test",), limit=8, transform="square 32", batch_size=8, seed=0,
                network="resnet18", weights="w", method="norm", settings=settings)  # fmt: skip
    outcome = run_unit(unit, BenchContext(tmp_path, files={"w": tmp_path / "w.safetensors"}))
    assert outcome.records[0]["n"] == 8
    assert outcome.arrays["prediction"].max() < 200
