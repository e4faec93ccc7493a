"""Scalars of a running stream, read back as TensorBoard reads them."""

import sys
from pathlib import Path

import pytest
import torch

from dpl.core.errors import MissingExtraError
from dpl.runs.live import Board, numbers
from report.runs import bench, make_adapted, make_store

pytestmark = pytest.mark.filterwarnings("ignore::dpl.data.DataWarning")


def scalars(folder: Path) -> dict[str, dict[str, list[tuple[int, float]]]]:
    """Every run's tags with steps and values."""
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator", reason="needs tensorboard")
    found = {}
    for run in sorted({path.parent for path in folder.rglob("events.out.tfevents.*")}):
        reader = events.EventAccumulator(str(run))
        reader.Reload()
        found[run.name] = {t: [(e.step, e.value) for e in reader.Scalars(t)] for t in reader.Tags()["scalars"]}
    return found


def test_numbers_are_what_can_be_drawn() -> None:
    assert numbers({"loss": 0.5, "updated": True, "reason": "none", "guard": {"a": 1}}) == {"loss": 0.5, "updated": 1.0}


def test_segments_follow_one_another(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="needs tensorboard")
    board = Board(tmp_path)
    for images in (8, 16, 8, 16):
        board.write("a/b", images, {"x": float(images)})
    board.close()
    assert scalars(tmp_path)["a_b"]["x"] == [(8, 8.0), (16, 16.0), (24, 8.0), (32, 16.0)]


def test_bench_writes_a_run_for_each_unit(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="needs tensorboard")
    make_store(tmp_path)
    assert (
        bench(tmp_path, tmp_path / "other", "--only", "method=tent,source", "--tensorboard", str(tmp_path / "tb")) == 0
    )
    found = scalars(tmp_path / "tb")
    assert len(found) == 8
    name = next(name for name in found if name.startswith("tent on pacs_sketch, seed 1"))
    assert {"accuracy", "confidence", "loss", "updated", "ms_per_image"} <= set(found[name])
    steps = [step for step, _ in found[name]["accuracy"]]
    assert steps == sorted(steps)
    assert steps[0] == 8


def test_adapt_writes_its_scalars(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="needs tensorboard")
    make_adapted(tmp_path, "--with-source", "--tensorboard", str(tmp_path / "tb"))
    found = scalars(tmp_path / "tb")["dpl on mine"]
    assert {"confidence", "agreement", "updated"} <= set(found)
    assert [step for step, _ in found["confidence"]][-1] == 60
    assert "accuracy" not in found  # nobody knows the labels


def test_without_tensorboard_the_extra_is_named(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    monkeypatch.delattr(torch.utils, "tensorboard", raising=False)
    with pytest.raises(MissingExtraError, match=r"dpl-tta\[tensorboard\]"):
        Board(tmp_path)
