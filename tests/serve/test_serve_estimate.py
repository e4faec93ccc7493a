"""Source images on the command line, accuracy without labels, and log lines that name their stream; real servers."""

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import torch
from browser import Browser, open_browser
from live import Process, batch, network, raw, wait_for

import dpl
from data.make import make_class_folders
from dpl.cli import main

CLASSES = [f"class{i}" for i in range(10)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("estimate")
    make_class_folders(folder / "images", CLASSES, per_class=6)
    return folder


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Process]:
    """A method that needs source images, watched with labelled ones."""
    images = str(folder / "images")
    running = Process(folder, "--source", images, "--calibrate", images, "--log-format", "json", "--live-models", "1",
                      "--latency-budget", "60", "--snapshot-every", "1", method="eata")  # fmt: skip
    yield running
    if running.process.poll() is None:
        running.stop()


@pytest.fixture
def http(server: Process) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=60) as client:
        yield client


def predict(http: httpx.Client, stream: str, number: int, images: int) -> None:
    http.post(f"/v1/streams/{stream}/predict?adapt=wait", **raw(batch(number, images))).raise_for_status()


def figures(http: httpx.Client) -> dict[str, float]:
    text = http.get("/metrics").text
    return {name: float(value) for name, value in re.findall(r'^dpl_stream_(\w+){stream="cam"} (\S+)$', text, re.M)}


def test_the_accuracy_of_a_stream_is_estimated(http: httpx.Client) -> None:
    assert http.get("/v1/server").json()["method"] == "eata"
    predict(http, "cam", 0, images=8)
    early = http.get("/v1/streams/cam").json()["estimate"]
    assert early["accuracy"] is None
    assert "8 images" in early["reason"]
    assert not [name for name in figures(http) if name.startswith("estimated")]
    for number in range(1, 12):  # if the guard replaces the model, the images are counted anew
        predict(http, "cam", number, images=48)
        estimate = http.get("/v1/streams/cam").json()["estimate"]
        if estimate["accuracy"] is not None:
            break
    assert all(0 <= estimate[key] <= 100 for key in ("low", "accuracy", "high", "source"))
    shown = figures(http)
    for key in ("accuracy", "low", "high", "source"):
        assert shown[f"estimated_{key}"] == pytest.approx(estimate[key])
    listed = {stream["stream"]: stream for stream in http.get("/v1/streams").json()["streams"]}
    assert listed["cam"]["estimate"] == estimate


def test_the_page_shows_the_estimate(server: Process, http: httpx.Client) -> None:
    estimate = http.get("/v1/streams/cam").json()["estimate"]
    predict(http, "new", 1, images=4)
    browser: Browser
    with open_browser() as browser:
        browser.resize(1600, 900)
        browser.open(server.url)
        browser.wait("document.querySelectorAll('#rows tr').length === 2")
        text = browser.value("document.querySelector('td.estimate').innerText")
        assert f"{estimate['accuracy']:.1f} %" in text
        assert f"source model {estimate['source']:.1f} %" in text
        assert browser.value("document.querySelectorAll('td.estimate').length") == 1  # the new stream has none yet
        assert browser.value("document.querySelector('.scroll').scrollWidth") <= 1600
        assert not browser.complaints


def test_every_log_line_about_a_stream_names_it(server: Process, http: httpx.Client, folder: Path) -> None:
    """What the guard, the jobs and the writer say, each in a thread of its own."""
    images = batch(1)
    images[1] *= 1e5
    broken = {"content": b"--x\r\nno header", "headers": {"Content-Type": "multipart/form-data; boundary=y"}}
    assert http.post("/v1/streams/odd/predict", **broken).status_code == 422
    http.post("/v1/streams/odd/predict?adapt=wait", **raw(images)).raise_for_status()
    http.post("/v1/streams/odd/reset").raise_for_status()
    (folder / "state" / "streams" / "blocked").write_text("in the way of a folder")
    predict(http, "blocked", 1, images=4)
    wait_for(lambda: http.get("/healthz").json()["status"] == "degraded")
    (folder / "state" / "streams" / "blocked").unlink()
    wait_for(lambda: http.get("/healthz").json()["status"] == "ok")
    http.delete("/v1/streams/odd").raise_for_status()
    text = (folder / "log.txt").read_text().splitlines()
    assert not [line for line in text if "oundary" in line]  # what a stranger sends is no warning
    lines = [json.loads(line) for line in text if line.startswith("{")]
    named = {word: [line["stream"] for line in lines if word in line["message"]]
             for word in ("set_aside", "reset", "cannot be written", "deleted")}  # fmt: skip
    assert named == {"set_aside": ["odd"], "reset": ["odd"], "cannot be written": ["blocked"], "deleted": ["odd"]}


def test_a_snapshot_of_a_watched_stream_is_loaded_by_the_library(server: Process, folder: Path) -> None:
    server.stop()
    newest = max((folder / "state" / "streams" / "cam").iterdir())
    source = [(batch(1, images=60), torch.arange(60) % 10)]
    model = dpl.load(newest, network(), source=source, calibrate=source)
    assert model.estimate().rows >= 100
    assert model.estimate().accuracy is not None


def test_other_source_images_are_refused(server: Process, folder: Path) -> None:
    """The streams were adapted with them; a copy elsewhere is the same."""
    if server.process.poll() is None:
        server.stop()
    shutil.copytree(folder / "images", folder / "copy")
    make_class_folders(folder / "other", CLASSES, per_class=7)
    calibrate = ["--calibrate", str(folder / "images")]
    Process(folder, "--source", str(folder / "copy"), *calibrate, method="eata").stop()
    with pytest.raises(AssertionError, match=re.escape("another model (different: source_images)")):
        Process(folder, "--source", str(folder / "other"), *calibrate, method="eata")


def test_a_method_that_needs_source_images_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["serve", "--model", "debug_cnn", "--random-weights", "--method", "eata", "--port", "0"]
    assert main([*options, "--state", str(tmp_path / "s")]) == 2
    assert "--source FOLDER" in capsys.readouterr().err
    (tmp_path / "flat").mkdir()
    for option in ("--source", "--calibrate"):
        assert main([*options, "--source", str(tmp_path / "flat"), option, str(tmp_path / "flat")]) == 2
        assert str(tmp_path / "flat") in capsys.readouterr().err
