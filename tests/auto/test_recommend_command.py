"""`dpl recommend` from the command line, on a folder of small images."""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from dpl.cli import main


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    pixels = np.random.default_rng(0).integers(0, 256, (40, 32, 32, 3), dtype=np.uint8)
    (tmp_path / "images").mkdir()
    for number, image in enumerate(pixels):
        Image.fromarray(image).save(tmp_path / "images" / f"{number:02}.png")
    return tmp_path / "images"


def test_it_prints_a_choice_and_its_reasons(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["recommend", "--model", "debug_cnn", "--random-weights", "--images", str(folder), "--batch-size", "8"]
    assert main([*words, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["call"].startswith("dpl.adapt(model, ")
    assert told["why"]
    assert main([*words, "--calibrate", str(folder), "--limit", "16"]) == 0
    assert "by hand: dpl.adapt(model, " in capsys.readouterr().out


def test_a_wrong_value_is_one_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recommend", "--model", "debug_cnn", "--random-weights", "--images", str(folder), "--limit", "0"]) == 2
    assert "--limit 0: expected at least 1" in capsys.readouterr().err
