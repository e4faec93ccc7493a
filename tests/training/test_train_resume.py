"""Stopped at any moment, a run goes on to the same bits; and a folder holds one run only."""

import json
import os
import shutil
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from dpl.core.errors import DataError, SettingError
from dpl.training import train
from training.killed_run import MOMENTS, SPEC

pytestmark = pytest.mark.filterwarnings("ignore::dpl.data.DataWarning")

CHILD = Path(__file__).with_name("killed_run.py")


class Stop(BaseException):
    """Not an Exception, so that nothing on the way takes it for an error of its own."""


def stop_after(step):
    def on_step(done, loss, mean):
        if done == step:
            raise Stop

    return on_step


def everything(folder):
    """Return all that a finished run leaves behind, without times."""
    log = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    result = json.loads((folder / "train.json").read_text())["result"]
    for entry in (*log, result):
        del entry["seconds"]
    tensors = {name: value.numpy().tobytes() for name, value in load_file(folder / "last/state.safetensors").items()}
    return (folder / "best.safetensors").read_bytes(), tensors, log, result


@pytest.fixture(scope="module")
def killed(pacs, tmp_path_factory):
    """Let one run for each moment meet its end."""
    root = tmp_path_factory.mktemp("killed")
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    told = subprocess.run(
        [sys.executable, CHILD, pacs, root], env=environment, capture_output=True, text=True, timeout=200
    )
    assert told.stdout.split() == [word for moment in MOMENTS for word in (moment, str(-signal.SIGKILL))], told.stderr
    return root


@pytest.fixture(scope="module")
def uninterrupted(pacs, tmp_path_factory):
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("whole") / "run"
    train(SPEC, data=pacs, out=folder)
    return folder


@pytest.mark.parametrize("moment", MOMENTS)
def test_after_kill_9_the_run_ends_with_the_same_bits(killed, uninterrupted, pacs, moment):
    folder = killed / moment
    assert json.loads((folder / "train.json").read_text())["result"] is None
    train(SPEC, data=pacs, out=folder)
    assert everything(folder) == everything(uninterrupted)
    assert not list(folder.glob(".*.tmp"))


@pytest.mark.parametrize("step", [0, 1, 3, 5])
def test_stopped_after_any_step_it_goes_on(spec, pacs, tmp_path, uninterrupted, step):
    with pytest.raises(Stop):
        train(SPEC, data=pacs, out=tmp_path / "run", on_step=stop_after(step))
    steps = []
    train(SPEC, data=pacs, out=tmp_path / "run", on_step=lambda step, *_: steps.append(step))
    first = 3 * (step // 3) + 1  # after the last validation, which was done and saved before its step was reported
    assert steps == list(range(first, SPEC.steps))
    assert everything(tmp_path / "run") == everything(uninterrupted)
    sessions = json.loads((tmp_path / "run" / "train.json").read_text())["sessions"]
    assert [session["from_step"] for session in sessions] == [0, first]


@pytest.mark.skipif(find_spec("torchvision") is None, reason="torchvision has a network with dropout")
def test_layers_that_draw_at_random_go_on_too(spec, pacs, tmp_path):
    made = spec(network="torchvision/mobilenet_v2", steps=3, per_domain=2, eval_every=9, max_val=2)
    train(made, data=pacs, out=tmp_path / "whole")
    with pytest.raises(Stop):
        train(made, data=pacs, out=tmp_path / "parts", on_step=stop_after(1))
    train(made, data=pacs, out=tmp_path / "parts")
    assert everything(tmp_path / "parts") == everything(tmp_path / "whole")


def test_a_finished_run_is_not_trained_again(uninterrupted, pacs, tmp_path):
    folder = shutil.copytree(uninterrupted, tmp_path / "run")
    before = everything(folder)
    result = train(SPEC, data=pacs, out=folder, on_step=stop_after(0))
    assert everything(folder) == before
    assert result.mean == before[3]["mean"]
    assert len(json.loads((folder / "train.json").read_text())["sessions"]) == 1


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"lr": 0.5}, r"with lr=0\.01; lr=0\.5 was asked for"),
        ({"target": "photo"}, "with target='sketch'; target='photo'"),
        ({"network": "cifar_resnet20"}, "with network='debug_cnn'"),
        ({"steps": 8}, "with steps=7"),
        ({"seed": 1}, "with seed=0"),
        ({"trial_seed": 1}, "with trial_seed=0"),
        ({"max_val": 3}, "with max_val=None"),
    ],
)
def test_other_settings_are_refused_by_name(uninterrupted, spec, pacs, changed, words):
    before = everything(uninterrupted)
    with pytest.raises(SettingError, match=words):
        train(spec(**changed), data=pacs, out=uninterrupted)
    assert everything(uninterrupted) == before


def test_other_weights_are_refused_and_the_same_ones_elsewhere_are_not(uninterrupted, spec, pacs, tmp_path):
    start = shutil.copy(uninterrupted / "best.safetensors", tmp_path / "start.safetensors")
    with pytest.raises(SettingError, match="with weights_sha256=None"):
        train(spec(weights=start), data=pacs, out=uninterrupted)
    train(spec(weights=start), data=pacs, out=tmp_path / "run")
    moved = shutil.move(start, tmp_path / "moved.safetensors")
    train(spec(weights=moved), data=pacs, out=tmp_path / "run")


def test_other_images_are_refused(spec, pacs, tmp_path):
    data = shutil.copytree(pacs, tmp_path / "data")
    train(spec(steps=1), data=data, out=tmp_path / "run")
    next((data / "PACS" / "photo" / "dog").iterdir()).unlink()
    with pytest.raises(SettingError, match="other images"):
        train(spec(steps=1), data=data, out=tmp_path / "run")


def test_a_folder_of_something_else_is_refused(spec, pacs, tmp_path):
    (tmp_path / "thesis.tex").write_text("precious")
    with pytest.raises(SettingError, match="holds other files and no training run"):
        train(spec(), data=pacs, out=tmp_path)
    with pytest.raises(SettingError, match="is a file"):
        train(spec(), data=pacs, out=tmp_path / "thesis.tex")


def test_two_runs_at_once_in_one_folder_are_refused(spec, pacs, tmp_path):
    pytest.importorskip("fcntl")

    def meanwhile(*_):
        with pytest.raises(SettingError, match="in use by another run"):
            train(spec(), data=pacs, out=tmp_path / "run")

    train(spec(steps=1), data=pacs, out=tmp_path / "run", on_step=meanwhile)


def test_damage_is_told_and_the_run_can_begin_again(uninterrupted, spec, pacs, tmp_path):
    folder = shutil.copytree(uninterrupted, tmp_path / "run")
    state = folder / "last" / "state.safetensors"
    state.write_bytes(state.read_bytes()[:-1])
    with pytest.raises(DataError, match=r"Remove .*last to start this run again"):
        train(spec(), data=pacs, out=folder)
    shutil.rmtree(folder / "last")
    train(spec(), data=pacs, out=folder)
    assert everything(folder) == everything(uninterrupted)
    (folder / "best.safetensors").unlink()
    with pytest.raises(DataError, match=r"best\.safetensors is missing"):
        train(spec(), data=pacs, out=folder)
    (folder / "train.json").write_text("{")
    with pytest.raises(DataError, match=r"train\.json is damaged"):
        train(spec(), data=pacs, out=folder)
