"""Snapshots that cannot be read or do not fit, and odd folders: every stream can be used, reset and deleted."""

import json
import logging
import shutil
from pathlib import Path

import pytest
import torch
from live import Live, adaptive, assert_same_state, batch, live, network, wait_for

import dpl
from dpl.core.errors import SnapshotError
from dpl.model.adaptive import DEFAULT_METHOD
from dpl.serve.monitoring import configure_logging
from dpl.snapshot import write_snapshot


def make_stream(folder: Path, batches: int = 2) -> list[Path]:
    """Return the snapshots of a stream, newest first."""
    with live(folder, snapshot_every=1) as server:
        for number in range(batches):
            server.predict("cam", number, adapt="wait")
            server.wait_until_written()
    return sorted((folder / "streams" / "cam").iterdir(), reverse=True)


def misfit(folder: Path) -> None:
    """Replace a snapshot by a valid one of another network."""
    manifest = json.loads((folder / "manifest.json").read_text())
    shutil.rmtree(folder)
    facts = {key: manifest[key] for key in ("stream", "seq", "version", "adapted", "images", "removed")}
    write_snapshot(folder, facts, {"model.fc.weight": torch.zeros(3, 3), "model.unknown": torch.zeros(1)})


def brackets(folder: Path) -> None:
    (folder / "manifest.json").write_text("[" * 200_000)


def refusals(server: Live) -> int:
    events = server.good("GET", "/v1/streams/cam/events")["events"]
    return sum(event["event"] == "snapshot_refused" for event in events)


@pytest.mark.parametrize("damage", [misfit, brackets])
def test_an_older_snapshot_is_used(tmp_path: Path, damage) -> None:
    damage(make_stream(tmp_path)[0])
    with live(tmp_path) as server:
        assert server.predict("cam", 9, adapt="off").status_code == 200
        assert refusals(server) == 1
        model = adaptive()
        model(batch(0))
        assert_same_state(server.state("cam"), model.state_dict())


@pytest.mark.parametrize("damage", [misfit, brackets])
@pytest.mark.parametrize("act", ["predict", "reset", "delete", "rollback"])
def test_a_stream_without_a_good_snapshot_is_not_beyond_repair(tmp_path: Path, damage, act: str) -> None:
    for snapshot in make_stream(tmp_path):
        damage(snapshot)
    with live(tmp_path) as server:
        if act == "delete":
            server.good("DELETE", "/v1/streams/cam")
            assert server.http.get("/v1/streams/cam").status_code == 404
            assert not list((tmp_path / "streams").glob("cam"))
            return
        if act == "reset":
            server.good("POST", "/v1/streams/cam/reset")
            assert_same_state(server.state("cam"), adaptive().state_dict())
        elif act == "rollback":
            assert server.http.post("/v1/streams/cam/rollback").status_code == 409
        assert server.predict("cam", 1, adapt="wait").json()["adaptation"]["status"] == "done"
        degraded = server.good("GET", "/healthz")["status"] == "degraded"
        assert degraded == (act != "reset")
        assert server.good("POST", "/v1/streams/cam/reset")["durable"] is True
        assert server.good("GET", "/healthz")["status"] == "ok"


def test_a_rollback_to_a_snapshot_that_does_not_fit_changes_nothing(tmp_path: Path) -> None:
    with live(tmp_path) as server:
        server.predict("cam", 0, adapt="wait")
        server.good("POST", "/v1/streams/cam/snapshot")
        server.predict("cam", 1, adapt="wait")
        before = server.state("cam")
        (oldest, *_) = sorted((tmp_path / "streams" / "cam").iterdir())
        misfit(oldest)
        assert server.http.post("/v1/streams/cam/rollback", json={"to": int(oldest.name[:12])}).status_code == 409
        assert_same_state(server.state("cam"), before)


def test_odd_folders_are_left_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (snapshot, *_) = make_stream(tmp_path)
    for name in ("Cam", "%zz", "a b", "%2e%2e", "x" * 120):
        shutil.copytree(snapshot, tmp_path / "streams" / name / snapshot.name)
    (tmp_path / "streams" / "a-file").write_text("no folder")
    (tmp_path / "streams" / "loop").symlink_to(tmp_path / "streams")
    with caplog.at_level(logging.WARNING, "dpl.serve"), live(tmp_path) as server:
        assert [s["stream"] for s in server.good("GET", "/v1/streams")["streams"]] == ["cam"]
        assert server.predict("cam", 1).status_code == 200
        assert server.predict("Cam", 1).status_code == 200
    assert "not the folder of a stream" in caplog.text


@pytest.mark.parametrize("guard", [False, True])
@pytest.mark.parametrize("method", ["tent", "dpl", DEFAULT_METHOD])
def test_a_snapshot_of_a_stream_is_loaded_by_the_library(tmp_path: Path, method: str, guard: bool) -> None:
    with live(tmp_path, method=method, guard=guard) as server:
        for number in range(2):
            server.predict("cam", number, adapt="wait")
        wanted = server.state("cam")
    model = dpl.load(max((tmp_path / "streams" / "cam").iterdir()), network())
    assert_same_state(model.state_dict(), wanted)
    images = batch(7)
    with live(tmp_path, method=method, guard=guard) as server:
        answer = server.predict("cam", 7, adapt="off", probabilities=True).json()
    got = torch.tensor([row["probabilities"] for row in answer["predictions"]])
    assert torch.allclose(got, model.predict(images).softmax(1), atol=1e-6)
    model.reset()
    assert_same_state(model.state_dict(), adaptive(method, guard).state_dict())


def test_a_snapshot_that_says_nothing_about_its_method_is_refused(tmp_path: Path) -> None:
    (snapshot, *_) = make_stream(tmp_path)
    misfit(snapshot)
    with pytest.raises(SnapshotError, match="dpl serve"):
        dpl.load(snapshot, network())


# What the log says.


@pytest.mark.parametrize("form", ["text", "json"])
def test_log_lines_name_their_stream(tmp_path: Path, form: str, capfd: pytest.CaptureFixture[str]) -> None:
    root, handlers = logging.getLogger(), logging.getLogger().handlers[:]
    level = root.level
    try:
        configure_logging(form)
        with live(tmp_path, guard=True) as server:
            images = batch(1)
            images[1] *= 1e5
            for act in ("reset", "rollback"):
                body = {"content": images.numpy().tobytes(), "headers": {"Content-Type": "application/octet-stream",
                                                                          "X-Shape": "4,3,32,32"}}  # fmt: skip
                server.good("POST", "/v1/streams/cam/predict?adapt=wait", **body)
                server.good("POST", "/v1/streams/cam/snapshot")
                server.http.post(f"/v1/streams/cam/{act}", json={"to": 2} if act == "rollback" else None)
            server.good("DELETE", "/v1/streams/cam")
            wait_for(lambda: not server.server.streams())
    finally:
        for handler in root.handlers[:]:
            root.removeHandler(handler)
        for handler in handlers:
            root.addHandler(handler)
        root.setLevel(level)
    lines = capfd.readouterr().err.splitlines()
    for word in ("set_aside", "reset", "rollback", "deleted"):
        line = next(line for line in lines if word in line)
        assert json.loads(line)["stream"] == "cam" if form == "json" else "stream cam: " in line, line
    assert any("stopped; every stream is on disk" in line for line in lines)


def test_only_batches_that_changed_a_parameter_count_as_adapted(tmp_path: Path) -> None:
    """`source` never changes one; the state is still saved, as the guard has a memory of its own."""
    with live(tmp_path, method="source") as server:
        for number in range(3):
            server.predict("cam", number, adapt="wait")
        assert server.settled("cam")["adapted_batches"] == 0
