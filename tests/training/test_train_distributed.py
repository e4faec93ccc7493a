"""A source model trained by two processes is the one that a single process trains on the same batches."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from data.make import make_pacs
from dpl.snapshot import read_snapshot
from dpl.training import TrainSpec, train

pytestmark = pytest.mark.filterwarnings("ignore::dpl.data.DataWarning")
# 3 domains of 5 images: 15 rows, so that one process has 8 and the other 7
SETTINGS = {"dataset": "PACS", "target": "sketch", "network": "debug_cnn", "size": 32, "steps": 6, "lr": 1e-4,
            "per_domain": 5, "eval_every": 3}  # fmt: skip


@pytest.fixture(scope="module")
def pacs(tmp_path_factory) -> Path:
    return make_pacs(tmp_path_factory.mktemp("data"), per_class=6)


def in_two_processes(data: Path, out: Path, **changed) -> subprocess.CompletedProcess[str]:
    options = [word for key, value in (SETTINGS | changed).items() for word in (f"--{key.replace('_', '-')}", value)]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--no-python"]
    command = [*launcher, str(Path(sys.executable).parent / "dpl"), "train", "--data", data, "--out", out,
               "--workers", 0, "--device", "cpu", "--json", *options]  # fmt: skip
    process = subprocess.Popen(
        [str(word) for word in command],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        told, complained = process.communicate(timeout=200)
    except subprocess.TimeoutExpired:  # the launcher's processes would keep its pipes open
        os.killpg(process.pid, signal.SIGKILL)
        raise
    return subprocess.CompletedProcess(command, process.returncode, told, complained)


def test_two_processes_train_the_model_of_one(pacs, tmp_path):
    alone = train(TrainSpec(**SETTINGS), data=pacs, out=tmp_path / "one", workers=0, device="cpu")
    done = in_two_processes(pacs, tmp_path / "two")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)  # the first process alone tells the result
    assert told["step"] == alone.step
    assert told["validation"] == pytest.approx(alone.validation)
    for mine, theirs in zip(alone.history, told["history"], strict=True):
        assert theirs["loss"] == pytest.approx(mine["loss"], rel=1e-5)
    one, two = (read_snapshot(tmp_path / name / "last")[1] for name in ("one", "two"))
    assert one.keys() == two.keys()
    for name, value in one.items():
        # moments take in whole activations whose ReLU falls on the other side of zero; weights hardly move by that
        tolerance = 1e-5 if name.startswith("network.") else 1e-4
        torch.testing.assert_close(
            two[name], value, rtol=1e-5, atol=tolerance, msg=lambda text, name=name: f"{name}: {text}"
        )
    record = json.loads((tmp_path / "two" / "train.json").read_text())
    assert [entry["processes"] for entry in record["sessions"]] == [2]
