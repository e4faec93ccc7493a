"""The recipes of docs/interop.md for loggers run as they stand there, against the real packages, without a network."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import dpl
from docs.pages import DOCS, blocks
from nets import images, network


@pytest.fixture(autouse=True)
def _own_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def run(package: str, **given: Any) -> dict[str, Any]:
    """Run the block of the page that imports a package, on a stream of two batches."""
    (block,) = [block for block in blocks(DOCS / "interop.md", "python") if f"import {package}\n" in block.text]
    names = {"__name__": "page", "dpl": dpl, "network": network(), "stream": [images(), images(seed=1)], **given}
    exec(compile("\n" * block.line + block.text, "docs/interop.md", "exec"), names)
    return names


def test_mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow", reason="mlflow is not installed")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # the small package has no database
    mlflow.set_tracking_uri(f"file:{tmp_path}/runs")
    run("mlflow")
    done = mlflow.last_active_run()
    history = mlflow.MlflowClient().get_metric_history(done.info.run_id, "loss")
    assert [metric.step for metric in history] == [0, 1]
    assert done.info.status == "FINISHED"


def test_weights_and_biases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb", reason="wandb is not installed")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    run("wandb")
    wandb.teardown()  # its process writes the file, and ends here
    (written,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    assert written.read_bytes().count(b"dpl/loss") >= 2, "two steps"


def test_lightning(tmp_path: Path) -> None:
    pytest.importorskip("lightning", reason="lightning is not installed")
    from lightning.pytorch.loggers import CSVLogger

    logger = CSVLogger(tmp_path, flush_logs_every_n_steps=1)
    loader = DataLoader(torch.cat([images(), images(seed=1)]), batch_size=len(images()))
    names = run("lightning", logger=logger, loader=loader)
    rows = (Path(logger.log_dir) / "metrics.csv").read_text().splitlines()
    assert len(rows) == 3, "a heading and two steps"
    assert "loss" in rows[0]
    expected = dpl.adapt(network(), "tent")
    for batch, predicted in zip(names["stream"], names["predictions"], strict=True):
        torch.testing.assert_close(predicted, expected(batch))
