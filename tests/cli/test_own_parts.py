"""A network and a method of one's own, by import path and by entry point."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import save_file

import dpl
from data.make import make_folder
from dpl.backbones import create
from dpl.cli import main
from dpl.core.extras import import_object

CLASSES = ("circle", "square", "triangle")
NETWORK = """
from dpl.backbones.cifar import DebugCNN
def build(num_classes=3):
    return DebugCNN(num_classes)
seven = 7
def nothing():
    return None
"""
METHOD = """
from dpl.methods.registry import register
from dpl.methods.tent import Tent
@register("{name}", paper="none", updates="affine", passes="1 forward, 1 backward")
class {kind}(Tent):
    "TENT under another name."
"""
EXPERIMENT = """
dataset: folder
domains: [photos/mine]
protocol: continual
network: ownnet:build
weights: w.safetensors
transform: square 32
batch_size: 4
methods: {own: {method: "placed:Placed"}, with DPL: {method: "placed:Placed+dpl", dpl_confidence: 0.3}}
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with a module of each kind and some images."""
    (tmp_path / "ownnet.py").write_text(NETWORK)
    make_folder(tmp_path / "photos", classes=CLASSES, per_class=4)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    return tmp_path


def run(here: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "dpl", *words]
    source = str(Path(dpl.__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([source, os.environ.get("PYTHONPATH", "")])}
    return subprocess.run(command, cwd=here, env=environment, capture_output=True, text=True, check=False)


def test_own_network_and_method_by_import_path(here: Path) -> None:
    (here / "ownmethod.py").write_text(METHOD.format(name="mine", kind="Mine"))
    words = [
        "--model",
        "ownnet:build",
        "--random-weights",
        "--images",
        "photos/mine",
        "--size",
        "32",
        "--batch-size",
        "4",
    ]
    done = run(here, "adapt", *words, "--import", "ownmethod", "--method", "mine")
    assert done.returncode == 0, done.stderr
    assert "method mine" in done.stdout


def test_an_experiment_file_names_own_parts_by_their_place(here: Path) -> None:
    (here / "placed.py").write_text(METHOD.format(name="placed", kind="Placed"))
    save_file(create("ownnet:build").state_dict(), "w.safetensors")
    (here / "own.yaml").write_text(EXPERIMENT)
    done = run(here, "bench", "own.yaml", "--data", ".", "--out", "runs", "--workers", "2", "--json")
    assert done.returncode == 0, done.stderr
    units = [json.loads(file.read_text()) for file in here.glob("runs/units/*/unit.json")]
    assert sorted(unit["method"] for unit in units) == ["placed:Placed", "placed:Placed+dpl"]
    records = [json.loads(file.read_text()) for file in here.glob("runs/units/*/results.jsonl")]
    assert [record["updates"] for record in records] == [3, 3]


def test_an_experiment_imports_own_methods_in_every_process(here: Path) -> None:
    (here / "registering.py").write_text(METHOD.format(name="registered", kind="Registered"))
    save_file(create("ownnet:build").state_dict(), "w.safetensors")
    (here / "own.yaml").write_text(EXPERIMENT.replace("placed:Placed", "registered"))
    words = ("bench", "own.yaml", "--data", ".", "--out", "runs", "--workers", "2")
    done = run(here, *words, "--import", "registering")
    assert done.returncode == 0, done.stderr
    assert len([*here.glob("runs/units/*/done")]) == 2
    missing = run(here, *words, "--import", "no_such_module")
    assert (missing.returncode, missing.stderr.count("'no_such_module' cannot be imported")) == (2, 1)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no_such_module:Mine", "cannot be imported: No module named 'no_such_module'"),
        ("ownnet:seven", "is no method: expected a class with the decorator @register"),
    ],
)
def test_what_is_no_method_is_named(here: Path, name: str, message: str) -> None:
    with pytest.raises(dpl.SettingError, match=message):
        dpl.adapt(create("debug_cnn"), name)


def test_entry_points_are_found(here: Path) -> None:
    (here / "offered.py").write_text(METHOD.format(name="offered", kind="Offered"))
    about = here / "own-0.1.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: own\nVersion: 0.1\n")
    points = "[dpl.methods]\noffered = offered:Offered\n[dpl.backbones]\nownnet = ownnet:build\n"
    (about / "entry_points.txt").write_text(points)
    code = "import dpl, dpl.backbones as b; print('offered' in dpl.list_methods(), type(b.create('ownnet')).__name__)"
    source = str(Path(dpl.__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([source, str(here)])}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "True DebugCNN\n"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no_such_module:build", "cannot be imported: No module named 'no_such_module'"),
        ("ownnet:biuld", "module ownnet has no 'biuld'"),
        ("ownnet:seven", "is int: expected a function or class"),
        ("ownnet:nothing", "returned NoneType: expected a torch.nn.Module"),
    ],
)
def test_what_is_no_network_is_named(here: Path, name: str, message: str) -> None:
    with pytest.raises(dpl.SettingError, match=message):
        create(name)


def test_a_network_gets_the_number_of_classes(here: Path) -> None:
    assert create("ownnet:build", num_classes=5).fc.out_features == 5
    assert import_object("ownnet").seven == 7


def test_a_method_that_needs_source_images_takes_a_folder(here: Path, capsys) -> None:
    save_file(create("debug_cnn", num_classes=len(CLASSES)).state_dict(), "w.safetensors")
    words = [
        "adapt",
        "--model",
        "debug_cnn",
        "--weights",
        "w.safetensors",
        "--images",
        "photos/mine",
        "--batch-size",
        "4",
    ]
    (here / "names.txt").write_text("\n".join(CLASSES))
    words += ["--classes", "names.txt", "--method", "eata"]
    assert main(words) == 2
    assert "--method eata needs labelled source images: give --source FOLDER" in capsys.readouterr().err
    assert main([*words, "--source", "photos/mine", "--snapshot", "s"]) == 0
    assert main([*words, "--source", "photos/mine", "--snapshot", "s"]) == 0
