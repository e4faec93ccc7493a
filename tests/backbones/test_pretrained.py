"""A folder that transformers wrote is a network: its weights, its normalisation, its classes and its image size."""

import csv
import json
from pathlib import Path

import pytest
import torch
import yaml

from data.make import make_folder
from dpl.backbones import create
from dpl.cli import main
from dpl.core.errors import DataError, SettingError

transformers = pytest.importorskip("transformers")
CLASSES = ("square", "triangle", "circle")  # not the order of the folders
MEAN, STD = [0.5, 0.4, 0.3], [0.2, 0.3, 0.4]
PROCESSOR = {"image_mean": MEAN, "image_std": STD, "size": {"height": 32, "width": 32}}


@pytest.fixture
def saved_model(tmp_path: Path) -> Path:
    """A small classifier with its processor, and images beside it."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.ViTConfig(**sizes, image_size=32, patch_size=8, id2label=dict(enumerate(CLASSES)))
    transformers.ViTForImageClassification(config).eval().save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    make_folder(tmp_path / "photos", classes=CLASSES, per_class=4)
    return tmp_path / "model"


def test_the_processor_normalises(saved_model: Path) -> None:
    network, images = create(str(saved_model)), torch.rand(2, 3, 32, 32)
    own = transformers.AutoModelForImageClassification.from_pretrained(saved_model)
    prepared = (images - torch.tensor(MEAN).view(3, 1, 1)) / torch.tensor(STD).view(3, 1, 1)
    with torch.no_grad():
        assert torch.equal(network(images).logits, own(prepared).logits)
    with pytest.raises(SettingError, match=r"num_classes=5: the network in .*model has 3 classes"):
        create(str(saved_model), num_classes=5)


def test_adapt_knows_its_classes_and_size(saved_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    photos, out = saved_model.parent / "photos" / "mine", saved_model.parent / "p.csv"
    words = ["adapt", "--model", str(saved_model), "--images", str(photos), "--out", str(out), "--batch-size", "4"]
    assert main([*words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["labelled"] == 12
    with out.open(newline="") as file:
        assert all(row["name"] == CLASSES[int(row["predicted"])] for row in csv.DictReader(file))


def test_as_weights_it_is_refused_with_the_way_to_name_it(
    saved_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    photos, advice = str(saved_model.parent / "photos" / "mine"), f"give --model {saved_model} without --weights"
    for command in (["adapt", "--images", photos], ["serve", "--port", "0"]):
        for weights in (saved_model, saved_model / "model.safetensors"):
            assert main([*command, "--model", "debug_cnn", "--weights", str(weights)]) == 2
            assert advice in capsys.readouterr().err
    words = ["adapt", "--images", photos, "--out", str(saved_model.parent / "p.csv"), "--model", str(saved_model)]
    assert main([*words, "--weights", str(saved_model / "model.safetensors")]) == 0  # its own: nothing to load


def test_an_experiment_names_network_and_weights(saved_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data, file = saved_model.parent / "photos", saved_model.parent / "own.yaml"
    own = {"network": str(saved_model), "weights": f"{saved_model}/model.safetensors"}
    fixed = {"dataset": "folder", "domains": ["mine"], "protocol": "continual", "methods": ["source"]}

    def bench(*words: str, **changes: str) -> tuple[int, str]:
        file.write_text(yaml.safe_dump(fixed | {"batch_size": 4, "transform": "square 32"} | own | changes))
        code = main(["bench", str(file), "--data", str(data), "--out", str(data.parent / "out"), *words])
        return code, capsys.readouterr().err

    for code, error in (bench(weights=str(saved_model)), bench("--weights", own["network"], weights="{weights}/a.pth")):
        assert (code, f"write `network: {saved_model}` and `weights: {own['weights']}`" in error) == (2, True)
    code, error = bench()
    assert (code, "numbers the classes as square, triangle ..., mine as circle, square" in error) == (2, True)
    config = json.loads((saved_model / "config.json").read_text())
    config["id2label"] = dict(enumerate(sorted(CLASSES)))
    (saved_model / "config.json").write_text(json.dumps(config))
    assert bench()[0] == 0


def test_a_folder_without_its_processor_or_its_network_is_named(saved_model: Path) -> None:
    (saved_model / "preprocessor_config.json").unlink()
    with pytest.raises(DataError, match=r"preprocessor_config\.json is missing: save the model's processor"):
        create(str(saved_model))
    (saved_model / "config.json").write_text("{}")
    with pytest.raises(DataError, match="no image classifier of transformers"):
        create(str(saved_model))
