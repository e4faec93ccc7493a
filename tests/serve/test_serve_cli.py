"""`dpl serve` from its options to a model: what a training run's folder says need not be said again."""

import argparse
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from data.make import make_class_folders, make_pacs
from dpl.cli import models, serve
from dpl.serve.settings import ServeSettings
from dpl.training import TrainSpec, train


@pytest.mark.filterwarnings("ignore::dpl.data.DataWarning")
def test_a_training_run_is_served_as_it_is(tmp_path: Path) -> None:
    data = make_pacs(tmp_path / "data", per_class=4)
    spec = TrainSpec(dataset="PACS", target="sketch", network="debug_cnn", size=40, steps=2, per_domain=2, eval_every=1)
    train(spec, data=data, out=tmp_path / "run")
    parser = argparse.ArgumentParser()
    parser.set_defaults(command="serve")
    serve.add_arguments(parser)
    for model in (tmp_path / "run", tmp_path / "run" / "best.safetensors"):
        args = parser.parse_args(["--model", str(model), "--method", "tent", "--live-models", "1"])
        server = serve._server(args, ServeSettings(state=tmp_path / "state", live_models=1), None)
        server.close()
        assert server.about["shape"] == [3, 40, 40]
        assert server.about["classes"][:2] == ["dog", "elephant"]
        assert server.about["guard"] is not None


def test_without_ray_the_extra_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from dpl.cli import main

    for name in [name for name in sys.modules if name.split(".")[0] == "ray"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "ray", None)  # as if it were not installed
    assert main(["serve", "--model", "debug_cnn", "--engine", "ray"]) != 0
    assert ".[ray]" in capsys.readouterr().err


def test_wrong_options_of_ray_are_told_before_it_starts(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("ray")
    from dpl.cli import main

    for options, hint in ((["--replicas", "0"], "replicas=0"), (["--method", "dlp"], "Did you mean")):
        assert main(["serve", "--model", "debug_cnn", "--random-weights", "--engine", "ray", *options]) == 2
        assert hint in capsys.readouterr().err


def test_source_images_are_told_apart_by_their_contents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of the same name and size is another one if a byte differs; of a large folder, those that are read."""
    folder, digest = make_class_folders(tmp_path / "one", ["a", "b"], per_class=4), models.digest
    (folder / "a" / "gone.png").symlink_to(tmp_path / "nowhere.png")
    first, *_, last = sorted((folder / "b").iterdir())
    before = digest(folder)
    assert digest(Path(shutil.copytree(folder, tmp_path / "copy", symlinks=True))) == before
    change_a_byte(last)
    assert digest(folder) != before
    monkeypatch.setattr(models, "SOURCE_IMAGES", 2)  # of nine: the first of each class
    few = digest(folder)
    change_a_byte(last)
    assert digest(folder) == few
    change_a_byte(first)
    assert digest(folder) != few
    change_a_byte(first)
    last.rename(last.with_name("other.jpg"))
    assert digest(folder) != few


def change_a_byte(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


def test_importing_changes_no_logger_of_others() -> None:
    code = """
import logging
import dpl.serve.app
assert logging.getLogger("python_multipart").level == logging.NOTSET
"""
    subprocess.run([sys.executable, "-c", code], check=True)
