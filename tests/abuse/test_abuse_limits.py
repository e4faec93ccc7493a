"""`dpl adapt` and `dpl bench` on a machine that lacks something: files, memory, disk, a steady clock.

Whatever happens, the next run on the same folder ends with the result of an undisturbed one.
"""

import itertools
import os
import re
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bench.tiny import make_weights, write_yaml
from data.make import make_pacs
from dpl.cli import main

COMMANDS = ("adapt", "bench")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Data, weights, an experiment, and the results of undisturbed runs in `good`."""
    place = tmp_path_factory.mktemp("limits")
    make_pacs(place / "data")
    make_weights(place / "data" / "weights" / "pacs.safetensors", 7)
    grid = {"dataset": "pacs", "protocol": "leave_one_domain_out", "targets": ["photo"], "network": "debug_cnn",
            "weights": "{weights}/pacs.safetensors", "batch_size": 8, "methods": ["tent"]}  # fmt: skip
    write_yaml(place / "grid.yaml", grid)
    for command in COMMANDS:
        assert main(words(command, place, place / "good")) == 0
    return place


def words(command: str, place: Path, out: Path) -> list[str]:
    data, threads = place / "data", ["--threads", "1"]
    if command == "bench":
        return ["bench", str(place / "grid.yaml"), "--data", str(data), "--out", str(out / "bench"), *threads]
    model = ["--model", str(data / "weights" / "pacs.safetensors"), "--network", "debug_cnn", "--size", "32"]
    images = ["--images", str(data / "PACS" / "photo"), "--batch-size", "8", "--out", str(out / "predictions.csv")]
    return ["adapt", *model, *images, "--method", "tent"]


def result(command: str, out: Path) -> Any:
    if command == "adapt":
        return (out / "predictions.csv").read_text()
    (file,) = out.glob("bench/units/*/predictions.npz")
    with np.load(file) as arrays:
        return {name: arrays[name].tolist() for name in arrays}


def assert_good(command: str, place: Path, out: Path) -> None:
    """Run undisturbed and compare."""
    assert main(words(command, place, out)) == 0
    assert result(command, out) == result(command, place / "good")


def limited(command: str, place: Path, out: Path, kind: int, most: int) -> int:
    """Run in a process with a limit of the system; return its exit code."""

    def limit() -> None:
        resource.setrlimit(kind, (most, most))

    line = [sys.executable, "-m", "dpl", *words(command, place, out)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(line, preexec_fn=limit, env=environment, capture_output=True).returncode


@pytest.mark.parametrize("command", COMMANDS)
def test_few_open_files_suffice(command: str, place: Path, tmp_path: Path) -> None:
    """As after `ulimit -n 64`."""
    assert limited(command, place, tmp_path, resource.RLIMIT_NOFILE, 64) == 0
    assert result(command, tmp_path) == result(command, place / "good")


@pytest.mark.skipif(sys.platform != "linux", reason="the limit of address space is Linux'")
@pytest.mark.parametrize("command", COMMANDS)
def test_too_little_memory(command: str, place: Path, tmp_path: Path) -> None:
    """As after `ulimit -v 700000`: PyTorch starts, and some later request for memory is refused."""
    assert limited(command, place, tmp_path, resource.RLIMIT_AS, 700 * 2**20) != 0
    assert_good(command, place, tmp_path)


@pytest.mark.parametrize("snapshot", [True, False])
def test_memory_that_runs_out_in_a_step_is_told_in_one_line(
    snapshot: bool, place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The system really refuses; with a snapshot the same command then resumes to the same predictions."""
    command, calls, most = words("adapt", place, tmp_path), 0, sys.maxsize
    command += ["--snapshot", str(tmp_path / "model"), "--save-every", "1"] if snapshot else []

    def ask_for_too_much(_layer: torch.nn.Module, _inputs: Any) -> None:
        nonlocal calls
        calls += 1
        if calls > most:
            torch.empty(2**50)

    hook = torch.nn.modules.module.register_module_forward_pre_hook(ask_for_too_much)
    try:
        assert main(words("adapt", place, tmp_path / "count")) == 0
        calls, most = 0, calls - 3  # in the last batch
        assert main(command) == 2
    finally:
        hook.remove()
    *_progress, line = capsys.readouterr().err.strip().splitlines()
    assert re.match(r"dpl adapt: memory ran out after 16 of 21 images: use a smaller --batch-size than 8", line)
    assert ("the same command again resumes" in line) == snapshot
    other = ["--batch-size", "4", "--snapshot", str(tmp_path / "other"), "--out", str(tmp_path / "other.csv")]
    assert main([*command, *other]) == 0
    capsys.readouterr()
    assert main(command) == 0
    assert ("resumed" in capsys.readouterr().out) == snapshot
    assert result("adapt", tmp_path) == result("adapt", place / "good")


def test_memory_that_runs_out_before_the_first_batch_is_told_in_one_line(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("dpl.cli.adapt.load_source", lambda _args: torch.empty(2**50))
    assert main(words("adapt", place, tmp_path)) == 2
    assert capsys.readouterr().err.startswith("dpl adapt: memory ran out before the first batch: use a smaller --model")
    assert not (tmp_path / "predictions.csv").exists()


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own, of 256 kB."""
    place = tmp_path / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(place)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("a small file system cannot be mounted here (needs root)")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_full_disk(command: str, place: Path, disk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with (disk / "filler").open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(4096))
    assert main(words(command, place, disk)) != 0
    assert f"No space left on device on the disk at {disk}" in capsys.readouterr().err
    (disk / "filler").unlink()
    assert_good(command, place, disk)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_read_only_disk(command: str, place: Path, disk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    assert main(words(command, place, disk)) != 0
    assert "Read-only file system" in capsys.readouterr().err
    subprocess.run(["mount", "-o", "remount,rw", str(disk)], check=True)
    assert_good(command, place, disk)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_folder_that_is_a_link(command: str, place: Path, tmp_path: Path) -> None:
    """A link is followed, also one that took the folder's place after a first run."""
    assert_good(command, place, tmp_path / "out")
    (tmp_path / "out").rename(tmp_path / "moved")
    (tmp_path / "out").symlink_to(tmp_path / "moved")
    assert_good(command, place, tmp_path / "out")
    (tmp_path / "out").unlink()
    (tmp_path / "empty").mkdir()
    (tmp_path / "out").symlink_to(tmp_path / "empty")
    assert_good(command, place, tmp_path / "out")


@pytest.mark.parametrize("command", COMMANDS)
def test_a_slow_disk_and_a_clock_that_jumps(
    command: str, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every flush takes a moment; the time of day jumps by a year, forward and back."""
    sync, now, jumps = os.fsync, time.time, itertools.cycle((0.0, 3e7, -3e7))
    monkeypatch.setattr(os, "fsync", lambda handle: (time.sleep(0.05), sync(handle)))
    monkeypatch.setattr(time, "time", lambda: now() + next(jumps))
    assert_good(command, place, tmp_path)
