"""`dpl train`: from the command line to the files, and one line for what is wrong."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from dpl.cli import main

pytestmark = pytest.mark.filterwarnings("ignore::dpl.data.DataWarning")
QUICK = ["--dataset", "pacs", "--network", "debug_cnn", "--size", "32", "--per-domain", "8", "--lr", "0.01"]


def command(pacs, out, *more):
    return ["train", "--data", str(pacs), "--out", str(out), *QUICK, *more]


def test_trains_and_tells_what_was_kept(pacs, tmp_path, capsys):
    assert main(command(pacs, tmp_path / "run", "--target", "sketch", "--steps", "4", "--eval-every", "2")) == 0
    printed = capsys.readouterr()
    assert "art_painting" in printed.out
    assert str(tmp_path / "run" / "best.safetensors") in printed.out
    assert "training: 4/4 loss" in printed.err
    settings = json.loads((tmp_path / "run" / "train.json").read_text())["settings"]
    assert (settings["size"], settings["per_domain"], settings["lr"], settings["steps"]) == (32, 8, 0.01, 4)


def test_json(pacs, tmp_path, capsys):
    assert main([*command(pacs, tmp_path / "run", "--source", "photo", "--steps", "2"), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert list(result["validation"]) == ["photo"]
    assert [entry["step"] for entry in result["history"]] == [0, 1]


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--target", "sketsh"], "Did you mean 'sketch'"),
        (["--target", "sketch", "--network", "debug_cn"], "Did you mean 'debug_cnn'"),
        (["--target", "sketch", "--weights", "nowhere.pth"], "nowhere.pth: cannot be read"),
        (["--target", "sketch", "--steps", "0"], "steps=0: expected a whole number"),
        (["--target", "sketch", "--workers", "-1"], "workers=-1"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(pacs, tmp_path, capsys, more, words):
    assert main(command(pacs, tmp_path / "run", *more)) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line.startswith("dpl train: ")
    assert words in line


def test_target_and_source_exclude_each_other(pacs, tmp_path, capsys):
    assert main(command(pacs, tmp_path / "run", "--target", "sketch", "--source", "photo")) == 2
    assert "not allowed with" in capsys.readouterr().err


def test_the_command_killed_from_outside_goes_on(pacs, tmp_path):
    """Killed whenever it happens to be: the same command again ends with the bits of a run that was left alone."""
    steps = ["--target", "sketch", "--steps", "80", "--eval-every", "40", "--max-val", "2"]
    words = command(pacs, tmp_path / "killed", *steps)
    script = [sys.executable, "-W", "ignore", "-c", "import sys; from dpl.cli import main; main(sys.argv[1:])"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    run = subprocess.Popen([*script, *words], env=environment, stderr=subprocess.DEVNULL)
    while not (tmp_path / "killed" / "last").exists():
        assert run.poll() is None
        time.sleep(0.05)
    time.sleep(0.2)
    run.send_signal(signal.SIGKILL)
    assert run.wait() == -signal.SIGKILL
    assert main(words) == 0
    assert main(command(pacs, tmp_path / "whole", *steps)) == 0
    killed, whole = ((tmp_path / name / "last/state.safetensors").read_bytes() for name in ("killed", "whole"))
    assert killed == whole
    assert (tmp_path / "killed/best.safetensors").read_bytes() == (tmp_path / "whole/best.safetensors").read_bytes()
    sessions = json.loads((tmp_path / "killed" / "train.json").read_text())["sessions"]
    assert [session["from_step"] > 0 for session in sessions] == [False, True]
