"""`dpl doctor`: what it finds on good and on broken models, images and arguments."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from data.make import make_folder
from dpl.backbones import create
from dpl.backbones.normalise import with_normalisation
from dpl.cli import main
from dpl.core.settings import make_settings
from dpl.methods import get_method
from dpl.runs.doctor import Check, examine
from nets import SmallNet

IMAGES = torch.rand(16, 3, 32, 32, generator=torch.Generator().manual_seed(0))


def trained(normalise: str = "imagenet") -> nn.Module:
    """A network whose BatchNorm statistics have seen images."""
    torch.manual_seed(0)
    network = create("debug_cnn", num_classes=3, normalise=normalise).train()
    network(IMAGES)
    return network.eval()


def checks(network: nn.Module, images: torch.Tensor = IMAGES, method: str = "dpl", size: int = 32, **values: Any):
    kind = get_method(method)
    settings = make_settings(kind.settings_class, method, values)
    return {check.name: check for check in examine(network, images, kind, settings, size)}


def statuses(found: dict[str, Check]) -> set[str]:
    return {check.status for check in found.values()}


def weight_file(path: Path, network: nn.Module) -> str:
    save_file(network.state_dict(), path)
    return str(path)


@pytest.fixture
def told(capsys: pytest.CaptureFixture[str]):
    """Runs the command with --json; returns its exit code and document."""

    def run(*words: str) -> tuple[int, dict[str, Any]]:
        code = main(["doctor", *words, "--json"])
        return code, json.loads(capsys.readouterr().out)

    return run


def test_a_good_model_is_ok_and_stays_as_it_is() -> None:
    network = trained()
    before = {name: value.clone() for name, value in network.state_dict().items()}
    found = checks(network)
    assert statuses(found) == {"ok"}
    assert found["classifier"].found == "network.fc: 32 features, 3 classes"
    assert found["norm layers"].found == "3 BatchNorm2d"
    assert found["parameters that train"].found == "affine 112, classifier 99, features 6,088, all 6,187"
    assert all(torch.equal(before[name], value) for name, value in network.state_dict().items())
    assert all(parameter.requires_grad for parameter in network.parameters())


@pytest.mark.parametrize("value", [-1.0, 0.0])
def test_broken_statistics_are_a_problem(value: float, tmp_path: Path, told) -> None:
    network = trained("none")
    network.layer2[1].running_var[3] = value
    code, document = told("--model", "debug_cnn", "--weights", weight_file(tmp_path / "w.safetensors", network))
    broken = {check["name"]: check for check in document["checks"]}
    assert code == 1
    assert broken["BatchNorm statistics"]["status"] == "problem"
    assert (broken["logits"]["status"] == "problem") == (value < 0)


def test_statistics_that_are_no_numbers_are_a_problem() -> None:  # a weight file with them is refused
    network = trained()
    network.network.layer1[1].running_mean[0] = float("nan")
    found = checks(network)
    assert found["BatchNorm statistics"].problem
    assert found["logits"].found.startswith("finite for 0 of 16 images")


def test_statistics_that_were_never_estimated_are_a_warning() -> None:
    assert checks(create("debug_cnn", normalise="imagenet"))["BatchNorm statistics"].status == "warning"


def test_normalisation_is_judged_where_it_arrives() -> None:
    network = trained()
    normalised = (IMAGES - network.mean) / network.std
    assert "twice" in checks(network, normalised)["normalisation"].problem
    assert "twice" in checks(with_normalisation(network, "imagenet"))["normalisation"].problem
    assert "bytes" in checks(network, IMAGES * 255)["normalisation"].problem
    assert "not normalised" in checks(network.network)["normalisation"].warning
    assert checks(network.network, normalised)["normalisation"].status == "ok"


def test_a_folder_that_is_normalised_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, told) -> None:
    folder = make_folder(tmp_path / "photos", classes=("a", "b", "c"), per_class=4)
    (tmp_path / "doctor_net.py").write_text(
        "from dpl.backbones import create\nfrom dpl.backbones.normalise import with_normalisation\n"
        "once = lambda: create('debug_cnn', normalise='imagenet')\n"
        "twice = lambda: with_normalisation(once(), 'imagenet')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    words = ("--random-weights", "--images", str(folder), "--size", "32")
    assert told("--model", "doctor_net:once", *words)[0] == 0
    code, document = told("--model", "doctor_net:twice", *words)
    assert code == 1
    assert [check["name"] for check in document["checks"] if check["status"] == "problem"] == ["normalisation"]


@pytest.mark.parametrize(
    ("method", "size", "values", "status"),
    [
        ("dpl", 1, {}, "problem"),
        ("dpl", 2, {"norm": "running"}, "ok"),
        ("actmad", 1, {}, "problem"),
        ("tent", 8, {}, "warning"),
        ("tent", 8, {"norm": "running"}, "ok"),
        ("tent", 32, {}, "ok"),
    ],
)
def test_the_batch_size_is_compared_with_the_method(method: str, size: int, values: dict, status: str) -> None:
    assert checks(trained(), method=method, size=size, **values)["batch size"].status == status


def test_a_network_that_lacks_what_the_method_needs() -> None:
    plain = nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    found = checks(plain)
    assert found["classifier"].status == "problem"
    assert checks(plain, method="tent")["parameters that train"].status == "problem"
    assert checks(SmallNet("group"), method="norm")["norm layers"].found == "2 GroupNorm"
    assert checks(SmallNet(), IMAGES[:, :1])["forward pass"].status == "problem"


def test_the_environment_alone(told, capsys: pytest.CaptureFixture[str]) -> None:
    code, document = told()
    assert code == 0
    assert {"dpl", "torch", "threads", "devices", "allocator", "layout"} <= document["environment"].keys()
    assert main(["doctor", "--model", "debug_cnn", "--random-weights"]) == 0
    assert "BatchNorm statistics: Load trained weights" in capsys.readouterr().out


def test_a_row_of_the_paper(told) -> None:
    pytest.importorskip("timm")
    code, document = told("--paper", "table1", "--row", "tent")
    causes = document["causes"]
    assert code == 0
    assert len(causes) == 9
    assert causes["weights of timm or torchvision"].startswith("resnet50 of timm")
    assert causes["5,000 or 50,000 images"] == "80% of the target domain"
    assert causes["BN mode"] == "norm='batch', scope='affine'"
    assert "batch size 32, lr chosen from [5e-06, 5e-05, 0.0005]" in causes["batch size against learning rate"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--paper", "table1", "--row", "tnt"], "Did you mean 'tent'?"),
        (["--paper", "tabel1", "--row", "tent"], "Did you mean 'table1'?"),
        (["--paper", "table1"], "belong together"),
        (["--images", "photos"], "give --model"),
        (["--model", "debug_cnn", "--random-weights", "--method", "tnt"], "Did you mean 'tent'?"),
        (["--model", "debug_cnn", "--random-weights", "--batch-size", "0"], "at least 1"),
    ],
)
def test_wrong_arguments(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", *words]) == 2
    assert message in capsys.readouterr().err
