"""`dpl export` takes the snapshot of `dpl adapt` and writes a plain network."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from data.make import make_folder
from dpl.backbones import create
from dpl.cli import main

CLASSES = ("circle", "square", "triangle")


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The options for a model, its images and the snapshot of a run over them."""
    root = tmp_path_factory.mktemp("run")
    torch.manual_seed(0)
    save_file(create("debug_cnn", num_classes=len(CLASSES), normalise="none").state_dict(), root / "w.safetensors")
    make_folder(root / "photos", classes=CLASSES, per_class=8)
    model = ["--model", "debug_cnn", "--weights", str(root / "w.safetensors"), "--images", str(root / "photos")]
    model += ["--snapshot", str(root / "s")]
    more = ["--method", "tent", "--set", "norm=batch", "--batch-size", "8", "--no-guard"]
    assert main(["adapt", *model, "--out", str(root / "p.csv"), *more]) == 0
    return model


def test_a_snapshot_becomes_a_plain_state_dict(adapted: list[str], tmp_path: Path, capsys) -> None:
    assert main(["export", *adapted, "--out", str(tmp_path / "out"), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    state = load_file(document["path"])
    create("debug_cnn", num_classes=3, normalise="none").load_state_dict(state)
    assert document["statistics"] == "statistics of 3 recent batches"
    assert document["images"] == 24
    assert 0 <= document["agreement"] <= 1


def test_the_agreement_is_printed_where_there_are_images(adapted: list[str], tmp_path: Path, capsys) -> None:
    assert main(["export", *adapted, "--out", str(tmp_path / "out")]) == 0
    assert "of 24 images predicted as by the adapted model" in capsys.readouterr().out
    place = adapted.index("--images")
    assert main(["export", *adapted[:place], *adapted[place + 2 :], "--out", str(tmp_path / "out")]) == 0
    assert "give --images DIR to compare" in capsys.readouterr().out


def test_a_program_is_made_from_a_snapshot_alone(adapted: list[str], tmp_path: Path, capsys) -> None:
    place = adapted.index("--images")
    words = [*adapted[:place], *adapted[place + 2 :], "--format", "torch_export", "--out", str(tmp_path / "m.pt2")]
    assert main(["export", *words]) == 0
    module = torch.export.load(tmp_path / "m.pt2").module()
    assert module(torch.rand(5, 3, 32, 32)).shape == (5, 3)


def test_a_folder_that_is_no_snapshot_is_named(adapted: list[str], tmp_path: Path, capsys) -> None:
    place = adapted.index("--snapshot")
    assert main(["export", *adapted[:place], "--snapshot", str(tmp_path), "--out", str(tmp_path / "out")]) == 2
    assert f"{tmp_path} is not a snapshot" in capsys.readouterr().err


def test_the_module_is_the_command() -> None:
    done = subprocess.run([sys.executable, "-m", "dpl", "list", "tent"], capture_output=True, text=True, check=True)
    assert "TENT" in done.stdout
