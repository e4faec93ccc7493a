"""`dpl bench` and `dpl corrupt`: a wrong path or value is one clear message, and nothing is half-written."""

import json
import re
import shutil

import numpy as np
import pytest
import yaml
from safetensors.torch import save_file

from bench.tiny import everything_file, make_weights, write_yaml
from data.make import make_cifar, make_cifar_c, make_class_folders, make_folder, make_imagenet_c, make_pacs
from dpl.backbones import create
from dpl.cli import main


@pytest.fixture
def tiny(tmp_path):
    make_pacs(tmp_path / "data")
    make_weights(tmp_path / "data" / "weights" / "pacs.safetensors", 7)
    content = {
        "dataset": "pacs",
        "protocol": "leave_one_domain_out",
        "targets": ["photo", "sketch"],
        "network": "debug_cnn",
        "weights": "{weights}/pacs.safetensors",
        "batch_size": 8,
        "methods": ["source", "tent"],
    }
    return write_yaml(tmp_path / "tiny.yaml", content)


def bench(file, data, out, *options) -> int:
    return main(["bench", str(file), "--data", str(data), "--out", str(out), "--threads", "1", *options])


def test_run_and_run_again(tiny, tmp_path, capsys):
    out = tmp_path / "out"
    assert bench(tiny, tmp_path / "data", out) == 0
    first = capsys.readouterr()
    assert "80% training split of each target domain, batch 8" in first.out
    assert re.search(r"method +photo +sketch +average", first.out)
    assert "4/4" in first.err
    assert bench(tiny, tmp_path / "data", out, "--json") == 0
    again = capsys.readouterr()
    document = json.loads(again.out)
    assert len(document["rows"]) == 4
    assert document["failed"] == {}
    assert "/4" not in again.err, "something was run again"


def test_only_some(tiny, tmp_path, capsys):
    arguments = ("--only", "method=tent", "--only", "target=photo", "--json")
    assert bench(tiny, tmp_path / "data", tmp_path / "out", *arguments) == 0
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    assert (row["method"], row["domains"]) == ("tent", ["photo"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--only", "method=tnt"), "Did you mean 'tent'"),
        (("--only", "tent"), "expected KEY=VALUE"),
        (("--only", "method=tent", "--only", "method=source"), "no run fits"),
        (("--limit", "0"), "--limit: 0: expected"),
        (("--workers", "0"), "--workers: 0: expected"),
    ],
)
def test_a_wrong_option_is_one_line(tiny, tmp_path, capsys, options, message):
    assert bench(tiny, tmp_path / "data", tmp_path / "out", *options) == 2
    errors = capsys.readouterr().err
    assert message in errors
    assert len(errors.splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_dry_run_writes_nothing(tiny, tmp_path, capsys):
    assert bench(tiny, tmp_path / "data", tmp_path / "out", "--dry-run") == 0
    assert "4 cells of the tables, 4 runs can start now" in capsys.readouterr().out
    assert not (tmp_path / "out").exists()


def spoil_empty(root):
    for entry in list(root.iterdir()):
        if entry.name != "weights":
            shutil.rmtree(entry)


def spoil_class(root):
    shutil.rmtree(root / "PACS" / "sketch" / "dog")


def spoil_empty_class(root):
    for image in (root / "PACS" / "sketch" / "dog").iterdir():
        image.unlink()


def spoil_domain(root):
    shutil.rmtree(root / "PACS" / "cartoon")


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (spoil_empty, "PACS was not found here"),
        (spoil_class, "class folders dog are missing"),
        (spoil_empty_class, "no image in the class folders dog"),
        (spoil_domain, "domains cartoon are missing"),
    ],
)
def test_half_copied_domains_are_told_before_anything_is_written(tiny, tmp_path, capsys, spoil, message):
    spoil(tmp_path / "data")
    assert bench(tiny, tmp_path / "data", tmp_path / "out") == 2
    errors = capsys.readouterr().err
    assert message in errors.splitlines()[0]
    assert "Traceback" not in errors
    assert not (tmp_path / "out").exists()


def test_a_wrong_folder_is_named(tiny, tmp_path, capsys):
    weights = ("--weights", str(tmp_path / "data" / "weights"))
    assert bench(tiny, tmp_path / "nowhere", tmp_path / "out", *weights) == 2
    assert "nowhere: no such folder" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("dataset", ["cifar10_c", "imagenet_c"])
def test_half_copied_corruptions_are_told_before_anything_is_written(dataset, tmp_path, capsys):
    data = tmp_path / "data"
    names = ["gaussian_noise", "fog"]
    make_cifar_c(data, corruptions=names, per_severity=10)
    make_imagenet_c(data, corruptions=names)
    make_weights(data / "weights" / "w.safetensors", 10 if dataset == "cifar10_c" else 1000)
    fog = data / "CIFAR-10-C" / "fog.npy"
    fog.write_bytes(fog.read_bytes()[:1000])
    shutil.rmtree(data / "ImageNet-C" / "fog" / "5")
    content = {"dataset": dataset, "protocol": "reset_each_shift", "domains": names, "network": "debug_cnn",
               "batch_size": 8, "weights": "{weights}/w.safetensors", "methods": ["source"]}  # fmt: skip
    assert bench(write_yaml(tmp_path / "c.yaml", content), data, tmp_path / "out") == 2
    errors = capsys.readouterr().err
    assert "fog" in errors.splitlines()[0]
    assert "Traceback" not in errors
    assert not (tmp_path / "out").exists()


def test_out_that_is_a_file_is_refused(tiny, tmp_path, capsys):
    (tmp_path / "out").write_text("mine")
    assert bench(tiny, tmp_path / "data", tmp_path / "out") == 2
    assert "Traceback" not in capsys.readouterr().err
    assert (tmp_path / "out").read_text() == "mine"


def test_one_failing_method_does_not_stop_the_others(tiny, tmp_path, capsys):
    rows = {"broken": {"method": "dpl_dagger", "style_layer": "nowhere"}, "source": None}
    content = yaml.safe_load(tiny.read_text()) | {"methods": rows, "targets": ["photo"]}
    assert bench(write_yaml(tiny, content), tmp_path / "data", tmp_path / "out", "--json") == 1
    document = json.loads(capsys.readouterr().out)
    assert [row["label"] for row in document["rows"]] == ["source"]
    (reason,) = document["failed"].values()
    assert "nowhere" in reason
    (note,) = (tmp_path / "out" / "failures").iterdir()
    assert "Traceback" in json.loads(note.read_text())["details"]


def test_limit_is_part_of_the_record(everything, tmp_path, capsys):
    file = everything_file(tmp_path, methods=["pl"])
    arguments = ("--limit", "5", "--only", "section=cifar100_c", "--json")
    assert bench(file, everything, tmp_path / "out", *arguments) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert {(row["limit"], row["n"]) for row in rows} == {(5, 5)}


def test_corrupt_a_folder_and_an_array_file(tmp_path, capsys):
    make_class_folders(tmp_path / "clean", ["a", "b"], per_class=2)
    names = ["--names", "fog,contrast"]
    arguments = ["corrupt", str(tmp_path / "clean"), str(tmp_path / "c"), *names, "--severities", "1,5", "--json"]
    assert main(arguments) == 0
    assert json.loads(capsys.readouterr().out)["written"] == 16
    assert len(list((tmp_path / "c" / "fog" / "5").glob("*/*.png"))) == 4
    make_cifar(tmp_path, "npz", count=6)
    (file,) = tmp_path.glob("*.npz")
    assert main(["corrupt", str(file), str(tmp_path / "CIFAR-10-C"), *names]) == 0
    assert np.load(tmp_path / "CIFAR-10-C" / "fog.npy").shape == (30, 32, 32, 3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--names", "fogg"], "Did you mean 'fog'"),
        (["--severities", "six"], "expected whole numbers"),
        (["--severities", "6"], "severity=6"),
        (["--transform", "square"], "transform"),
        (["--workers", "0"], "workers=0"),
    ],
)
def test_corrupt_refuses_wrong_values(tmp_path, capsys, arguments, message):
    make_class_folders(tmp_path / "clean", ["a"], per_class=1)
    assert main(["corrupt", str(tmp_path / "clean"), str(tmp_path / "c"), *arguments]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"network": "debug_cmm"}, "debug_cmm"),
        ({"network": "cifar_resnet32", "weights": "{data}/r20.safetensors"}, "r20.safetensors"),
        ({"methods": ["eata"], "source": {"dataset": "folder", "domains": ["mine"]}}, "source: mine has 2 classes"),
    ],
)
def test_a_dry_run_checks_network_weights_and_source_images(tiny, tmp_path, capsys, changes, message):
    save_file(create("cifar_resnet20", num_classes=7).state_dict(), tmp_path / "data" / "r20.safetensors")
    make_folder(tmp_path / "data")
    write_yaml(tiny, yaml.safe_load(tiny.read_text()) | changes)
    assert bench(tiny, tmp_path / "data", tmp_path / "out", "--dry-run") == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert message in error
    assert error.startswith("dpl bench: ")
    assert not (tmp_path / "out").exists()


def test_folders_are_streamed_as_domains(tmp_path, capsys):
    for number, domain in enumerate(("day", "night")):
        make_class_folders(tmp_path / "data" / "cam" / domain, ("cat", "dog"), per_class=4, seed=number)
    make_weights(tmp_path / "data" / "weights" / "mine.safetensors", 2)
    content = {
        "dataset": "folder", "domains": ["cam/day", "cam/night"], "protocol": "continual", "network": "debug_cnn",
        "weights": "{weights}/mine.safetensors", "batch_size": 4, "methods": ["source", "tent"],
        "transform": "square 32",
    }  # fmt: skip
    file = write_yaml(tmp_path / "own.yaml", content)
    assert bench(file, tmp_path / "data", tmp_path / "out", "--json") == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [(row["method"], row["segment"], row["n"]) for row in rows] == [
        (method, domain, 8) for method in ("source", "tent") for domain in ("cam/day", "cam/night")
    ]
    assert rows[0]["classes"] == ["cat", "dog"]
    (tmp_path / "data" / "cam" / "night" / "dog").rename(tmp_path / "data" / "cam" / "night" / "cow")
    assert bench(file, tmp_path / "data", tmp_path / "out", "--dry-run") == 2
    assert "expected the same class folders in each" in capsys.readouterr().err
    write_yaml(file, {key: value for key, value in content.items() if key != "domains"})
    assert bench(file, tmp_path / "data", tmp_path / "out", "--dry-run") == 2
    assert "folder needs domains" in capsys.readouterr().err
