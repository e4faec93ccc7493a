"""A folder of images, stopped and resumed: predictions, state and record go on as if nothing had happened."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import dpl
from dpl.data import open_folder, unchanged
from dpl.runs.folder import FolderResult, FolderRun, record_path, run_folder
from dpl.runs.online import BatchResult
from nets import images, network


class Stopped(Exception):
    pass


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    random = np.random.default_rng(0)
    for number in range(12):
        path = tmp_path / "pictures" / f"class{number % 3}" / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(random.integers(0, 256, (8, 8, 3), dtype=np.uint8)).save(path)
    return tmp_path / "pictures"


def test_a_stopped_run_goes_on_with_its_predictions_and_its_record(pictures: Path, tmp_path: Path) -> None:
    source = network()

    def run(name: str, stop_after: int | None = None) -> FolderResult:
        def on_batch(result: FolderResult) -> None:
            if result.batches == stop_after:
                raise Stopped

        asked = FolderRun(open_folder(pictures), unchanged(), tmp_path / f"{name}.csv", snapshot=tmp_path / name,
                          batch_size=3, save_every=1)  # fmt: skip
        return run_folder(asked, dpl.adapt(source, "tent", lr=0.1, guard=True), source, on_batch)

    whole = run("whole")
    with pytest.raises(Stopped):
        run("parts", stop_after=2)
    parts = run("parts")
    assert (parts.resumed, parts.images, parts.batches) == (6, whole.images, whole.batches)
    assert (tmp_path / "parts.csv").read_text() == (tmp_path / "whole.csv").read_text()
    one, two = (json.loads(record_path(tmp_path / f"{name}.csv").read_text()) for name in ("whole", "parts"))
    assert two["timed"] == one["timed"] == 12
    assert two["events"] == one["events"]
    assert two["skipped_because"] == one["skipped_because"]
    assert one.keys() == two.keys()
    assert (one["total"], one["method"], one["guard"], one["batch_size"]) == (12, "tent", True, 3)


def test_a_result_keeps_the_guards_events_and_few_different_reasons() -> None:
    model, batch = dpl.adapt(network(), "pl", guard=True), images(6)
    batch[2] = float("nan")
    result = FolderResult()
    for number in range(25):
        model(batch)
        step = BatchResult(None, [0] * 6, [1.0] * 6, 0.5, f"reason {number}", torch.zeros(6, 3))
        result.add(step, model.guard if number < 2 else None)
    assert [event["action"] for event in result.events if event["action"] == "set_aside"] == ["set_aside"] * 2
    assert (result.batches, result.updates, result.seconds, result.timed) == (25, 0, 12.5, 150)
    assert len(result.skipped_because) == 21
    assert result.skipped_because["others"] == 5
    counts, more = result.parts()
    assert FolderResult(**json.loads(json.dumps(counts | more))) == result


def test_every_layer_keeps_its_mode_when_the_source_model_predicts_too(pictures: Path, tmp_path: Path) -> None:
    source = network().train()
    layer = next(source.children()).eval()
    asked = FolderRun(open_folder(pictures), unchanged(), tmp_path / "p.csv", with_source=True)
    run_folder(asked, dpl.adapt(source, "tent"), source, lambda _result: None)
    assert source.training
    assert not layer.training
