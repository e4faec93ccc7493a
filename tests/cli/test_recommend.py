"""`dpl recommend` from the command line, on a folder of small images."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from dpl.cli import main


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    pixels = np.random.default_rng(0).integers(0, 256, (60, 32, 32, 3), dtype=np.uint8)
    (tmp_path / "images").mkdir()
    for number, image in enumerate(pixels):
        Image.fromarray(image).save(tmp_path / "images" / f"{number:02}.png")
    return tmp_path / "images"


@pytest.fixture
def labelled(folder: Path) -> Path:
    root = folder.parent / "labelled"
    for number, path in enumerate(sorted(folder.iterdir())):
        (root / str(number % 10)).mkdir(parents=True, exist_ok=True)
        shutil.copy(path, root / str(number % 10))
    return root


def test_it_prints_a_choice_and_its_reasons(folder: Path, labelled: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["recommend", "--model", "debug_cnn", "--random-weights", "--images", str(folder), "--batch-size", "8"]
    assert main([*words, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["method"] == "dpl_soft"
    assert told["images"] == 60
    parts = ("batch statistics", "learning", "answers of the memory")
    assert list(told["changed"]) == ["source model", *(f"without {part}" for part in parts)]
    assert all(0 <= share <= 1 for share in told["changed"].values())
    left_out = [told["changed"][f"without {part}"] < 0.01 for part in parts]
    assert [name in told["settings"] for name in ("norm", "loss", "answer")] == left_out
    assert told["estimate"]["verdict"] == "unsure"  # too few images
    assert main([*words, "--calibrate", str(labelled), "--limit", "60"]) == 0
    assert "dpl adapt --method dpl_soft " in capsys.readouterr().out


def test_a_wrong_value_is_one_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recommend", "--model", "debug_cnn", "--random-weights", "--images", str(folder), "--limit", "0"]) == 2
    assert "--limit: 0: expected a whole number of at least 1" in capsys.readouterr().err
