"""The command line as a user meets it: what it prints, what it writes, how it says no."""

import csv
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from data.make import make_folder
from dpl.backbones import create
from dpl.cli import COMMANDS, main
from dpl.cli.adapt import _guarded
from dpl.methods import list_methods
from dpl.runs.folder import FolderResult

CLASSES = ("circle", "square", "triangle")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of class folders, one file of which is no image."""
    root = tmp_path_factory.mktemp("images")
    made = make_folder(root / "photos", classes=CLASSES, per_class=20)
    (made / CLASSES[0] / "broken.jpg").write_text("not an image")
    return made


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("weights") / "mine.safetensors"
    save_file(create("debug_cnn", num_classes=len(CLASSES), normalise="none").state_dict(), path)
    return path


def arguments(folder: Path, weights: Path, out: Path, *more: str) -> list[str]:
    fixed = ["--model", "debug_cnn", "--weights", str(weights), "--images", str(folder), "--out", str(out)]
    return ["adapt", *fixed, "--method", "dpl", "--batch-size", "8", "--set", "confidence=0.2", *more]


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_adapt_predicts_a_folder(folder: Path, weights: Path, tmp_path: Path, capsys) -> None:
    assert main(arguments(folder, weights, tmp_path / "p.csv", "--snapshot", str(tmp_path / "s"))) == 0
    found, printed = rows(tmp_path / "p.csv"), capsys.readouterr()
    assert len(found) == 60
    assert {row["label"] for row in found} == set(CLASSES)
    assert all(0 <= float(row["confidence"]) <= 1 and row["name"] in CLASSES for row in found)
    right = sum(row["name"] == row["label"] for row in found)
    assert f"online accuracy {100 * right / 60:.2f} %" in printed.out
    assert "broken.jpg" in printed.err
    assert (tmp_path / "s" / "manifest.json").is_file()


def test_adapt_prints_what_the_guard_did(folder: Path, weights: Path, tmp_path: Path, capsys) -> None:
    assert main(arguments(folder, weights, tmp_path / "p.csv", "--guard-set", "high=0.9")) == 0
    assert "guard: set_aside " in capsys.readouterr().out
    assert main(arguments(folder, weights, tmp_path / "q.csv", "--no-guard")) == 0
    assert "guard: off" in capsys.readouterr().out
    frozen = FolderResult(images=60, guard={"suspect": 2, "reset": 0, "freeze": 1}, by_source=40)
    assert _guarded(frozen) == "suspect 2, freeze 1; the source model predicted 40 of 60 images"


def test_adapt_estimates_the_accuracy_from_labelled_source_images(
    folder: Path, weights: Path, tmp_path: Path, capsys
) -> None:
    more = ("--calibrate", str(folder), "--snapshot", str(tmp_path / "s"))
    words = arguments(folder, weights, tmp_path / "p.csv", *more)
    assert main([*words, "--set", "seed=3", "--json"]) == 0
    estimate = json.loads(capsys.readouterr().out)["estimate"]
    assert estimate["rows"] == 60
    assert estimate["verdict"] == "unsure"
    assert json.loads((tmp_path / "p.run.json").read_text())["result"]["estimate"] == estimate
    assert main([*words, "--set", "seed=3"]) == 0
    assert "estimated accuracy without labels: unsure: 60 images were looked at" in capsys.readouterr().out


def test_an_image_that_the_guard_excludes_gets_no_prediction(
    folder: Path, weights: Path, tmp_path: Path, capsys
) -> None:
    assert main(arguments(folder, weights, tmp_path / "p.csv", "--guard-set", "high=0.9", "--json")) == 0
    document = json.loads(capsys.readouterr().out)
    aside = [path for path, reason in document["failed"] if "out of range" in reason]
    assert len(aside) == document["guard"]["set_aside"] > 0
    assert document["images"] + len(document["failed"]) == 61
    assert not {row["image"] for row in rows(tmp_path / "p.csv")} & set(aside)


def test_a_job_is_not_resumed_without_its_guard(folder: Path, weights: Path, tmp_path: Path, capsys) -> None:
    words = arguments(folder, weights, tmp_path / "p.csv", "--snapshot", str(tmp_path / "s"))
    assert main(words) == 0
    assert main([*words, "--no-guard"]) == 2
    assert "guard" in capsys.readouterr().err


def test_adapt_prints_one_json_document(folder: Path, weights: Path, tmp_path: Path, capsys) -> None:
    assert main(arguments(folder, weights, tmp_path / "p.csv", "--json")) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["images"] == 60
    assert document["failed"][0][0].endswith("broken.jpg")
    assert set(document["guard"].values()) == {0}
    assert document["by_source"] == 0


def test_adapt_continues_exactly_after_a_kill(folder: Path, weights: Path, tmp_path: Path) -> None:
    straight = arguments(folder, weights, tmp_path / "straight.csv")
    assert main(straight) == 0
    words = arguments(folder, weights, tmp_path / "p.csv", "--snapshot", str(tmp_path / "s"))
    process = subprocess.Popen([sys.executable, "-c", SLOW, *words, "--save-every", "2"], stderr=subprocess.DEVNULL)
    while not (tmp_path / "s" / "manifest.json").is_file():
        time.sleep(0.02)
        assert process.poll() is None, "finished before it could be killed"
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert len(rows(tmp_path / "p.csv")) < 60
    assert main(words) == 0
    assert (tmp_path / "p.csv").read_text() == (tmp_path / "straight.csv").read_text()
    assert main(words) == 0  # nothing left to do
    assert (tmp_path / "p.csv").read_text() == (tmp_path / "straight.csv").read_text()


# Takes its time after each save, so that a kill finds it in the middle.
SLOW = """
import sys, time
import dpl
from dpl.cli import main
save = dpl.AdaptiveModel.save
def slowly(*arguments):
    save(*arguments)
    time.sleep(1)
dpl.AdaptiveModel.save = slowly
main(sys.argv[1:])
"""


def test_a_snapshot_of_another_job_is_refused(folder: Path, weights: Path, tmp_path: Path, capsys) -> None:
    assert main(arguments(folder, weights, tmp_path / "p.csv", "--snapshot", str(tmp_path / "s"))) == 0
    again = arguments(folder, weights, tmp_path / "p.csv", "--snapshot", str(tmp_path / "s"), "--seed", "5")
    assert main(again) == 2
    assert "another run, which had other order;" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (["--method", "dlp"], "Did you mean 'dpl'?"),
        (["--model", "resnett18"], "resnett18"),
        (["--images", "/no/such/folder"], "no such folder"),
        (["--set", "confidense=1"], "Did you mean 'confidence'?"),
        (["--set", "lr"], "--set lr: expected KEY=VALUE"),
        (["--guard-set", "limit"], "--guard-set limit: expected KEY=VALUE, e.g. --guard-set limit=4"),
        (["--save-every", "0"], "--save-every: 0: expected a whole number of at least 1"),
        (["--weights", "/no/such/file"], "/no/such/file"),
        (["--batch-size", "0"], "at least 1"),
        (["--device", "gpu7"], "device='gpu7'"),
        (["--classes", "/no/such/names"], "/no/such/names"),
    ],
)
def test_wrong_arguments_give_one_line_and_exit_code_2(
    change, words: str, folder: Path, weights: Path, tmp_path: Path, capsys
) -> None:
    assert main(arguments(folder, weights, tmp_path / "p.csv", *change)) == 2
    printed = capsys.readouterr().err
    assert words in printed
    assert "Traceback" not in printed
    assert not (tmp_path / "p.csv").exists()


def test_an_argument_that_is_no_setting_is_named(tmp_path: Path, capsys) -> None:
    Image.new("RGB", (32, 32)).save(tmp_path / "a.png")
    words = ["adapt", "--model", "debug_cnn", "--random-weights", "--images", str(tmp_path), "--set", "guard=1"]
    assert main(words) == 2
    assert "'dpl_soft' has no setting 'guard'" in capsys.readouterr().err


def test_list_shows_every_method(capsys) -> None:
    assert main(["list"]) == 0
    printed = capsys.readouterr().out
    assert all(name in printed for name in list_methods())


def test_list_shows_settings_of_a_composition(capsys) -> None:
    assert main(["list", "tent+dpl"]) == 0
    assert "dpl_confidence" in capsys.readouterr().out


def test_list_as_json(capsys) -> None:
    assert main(["list", "--json"]) == 0
    records = json.loads(capsys.readouterr().out)
    assert {record["name"] for record in records} == set(list_methods())
    assert all(record["paper"] and record["passes"] for record in records)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command: str, capsys) -> None:
    with pytest.raises(SystemExit) as stopped:
        main([command, "--help"])
    assert stopped.value.code == 0
    assert "--json" in capsys.readouterr().out


def test_no_command_prints_help(capsys) -> None:
    assert main([]) == 0
    assert "demo" in capsys.readouterr().out


def test_a_warning_is_one_line_without_code() -> None:
    code = (
        "import warnings, dpl.cli.list as command; from dpl.cli import main; "
        "command.run = lambda args: warnings.warn('be careful', stacklevel=1); main(['list'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr == "warning: be careful\n"


def test_a_misspelled_option_is_named_with_the_nearest_one(folder: Path, weights: Path, tmp_path: Path, capsys) -> None:
    assert main([*arguments(folder, weights, tmp_path / "p.csv"), "--metod", "tent"]) == 2
    said = "dpl adapt: unrecognized arguments: --metod tent. Did you mean '--method'?\n"
    assert capsys.readouterr().err == said


def test_ctrl_c_while_the_package_is_imported_leaves_no_traceback() -> None:
    code = "import sys\nclass Stop:\n    def find_spec(self, name, *_):\n"
    code += "        if name == 'dpl': raise KeyboardInterrupt\n"
    code += "sys.meta_path.insert(0, Stop())\nfrom dpl_command import main\nsys.exit(main())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (130, "dpl: interrupted\n")


def test_ctrl_c_while_the_options_are_read_leaves_no_traceback(monkeypatch, capsys) -> None:
    monkeypatch.setattr("dpl.cli._Parser", lambda **_: (_ for _ in ()).throw(KeyboardInterrupt))
    assert main(["adapt"]) == 130
    assert "dpl adapt: interrupted" in capsys.readouterr().err


def test_torchvision_imports_after_dpl() -> None:
    """The torchvision of the Python index lacks operators beside a CPU-only torch."""
    pytest.importorskip("timm", reason="the extra `bench` is not installed")
    code = "import dpl, sys; assert 'torchvision' not in sys.modules; from torchvision.models import resnet18"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_photos_in_a_format_that_is_not_read_are_counted(weights: Path, tmp_path: Path, capsys) -> None:
    made = make_folder(tmp_path / "photos", classes=CLASSES, per_class=4)
    (made / CLASSES[0] / "IMG_1.HEIC").write_bytes(b"x")
    assert main(arguments(made, weights, tmp_path / "p.csv")) == 0
    assert "1 files (.heic, .heif, .avif) are not read" in capsys.readouterr().err


def test_report_names_the_extra_that_it_needs(monkeypatch, capsys, tmp_path):
    monkeypatch.setitem(sys.modules, "jinja2", None)
    assert main(["report", str(tmp_path)]) == 2
    told = capsys.readouterr().err
    assert told.startswith("dpl report: ")
    assert "jinja2" in told
    assert "[bench]" in told
    assert told.count("\n") == 1
