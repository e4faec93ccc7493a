"""Streams are independent, exact through every move between model, memory and disk, and survive a restart."""

from pathlib import Path

import pytest
import torch
from live import Replay, adaptive, assert_same_state, batch, live, open_live, state_on_disk


def expected(numbers: list[int], method: str = "tent", guard: bool = False) -> dict[str, torch.Tensor]:
    model = adaptive(method, guard)
    for number in numbers:
        model(batch(number))
    return model.state_dict()


def test_a_stream_adapts_as_the_library_does(tmp_path: Path) -> None:
    with live(tmp_path) as server:
        model = adaptive()
        for number in range(5):
            answer = server.predict("cam", number, adapt="wait", probabilities=True).json()
            logits = model(batch(number))
            assert torch.equal(torch.tensor([p["probabilities"] for p in answer["predictions"]]), logits.softmax(1))
            assert answer["adaptation"]["status"] == "done"
            assert answer["adaptation"]["updated"] is True
            assert (answer["seq"], answer["stream"]) == (number + 1, "cam")
        assert_same_state(server.state("cam"), model.state_dict())


@pytest.mark.parametrize(
    ("method", "guard"), [("tent", False), ("tent", True), ("dpl", True), ("rotta", True), ("t3a", False)]
)
def test_streams_on_shared_models_are_independent_and_exact(tmp_path: Path, method: str, guard: bool) -> None:
    """Six streams take turns on two live models and three places in memory: each ends as if it were alone."""
    names = [f"cam-{i}" for i in range(6)]
    with live(tmp_path, method=method, guard=guard, max_streams_in_memory=3) as server:
        for turn in range(4):
            for i, name in enumerate(names):
                assert server.predict(name, 10 * i + turn).status_code == 200
        spilled = server.server.metrics.spills._value.get()
        assert spilled >= 12, "the streams never went to disk"
        for i, name in enumerate(names):
            assert_same_state(server.state(name), expected([10 * i + turn for turn in range(4)], method, guard))


def test_another_tenant_is_untouched_to_the_bit(tmp_path: Path) -> None:
    """Extreme images in one stream leave no trace in the other, nor in the source."""
    with live(tmp_path, live_models=1, max_streams_in_memory=1) as server:
        server.predict("good", 1)
        before = server.state("good")
        poison = (torch.rand(4, 3, 32, 32) * 1e6).numpy().astype("<f4").tobytes()
        headers = {"Content-Type": "application/octet-stream", "X-Shape": "4,3,32,32"}
        for _ in range(5):
            server.http.post("/v1/streams/bad/predict", content=poison, headers=headers)
        assert_same_state(server.state("good"), before)
        server.predict("good", 2)
        server.predict("fresh", 7)
        assert_same_state(server.state("good"), expected([1, 2]))
        assert_same_state(server.state("fresh"), expected([7]))


def test_only_what_differs_is_stored(tmp_path: Path) -> None:
    with live(tmp_path) as server:
        server.predict("cam", 1, adapt="wait")
        size = server.good("POST", "/v1/streams/cam/snapshot")["snapshot"]["bytes"]
        full = sum(v.numel() * v.element_size() for v in adaptive().state_dict().values())
        assert 0 < size < full / 5  # Tent trains the affine parameters alone
        fresh = server.predict("idle", 1, adapt="off")
        assert fresh.json()["adaptation"]["status"] == "off"
        assert server.good("POST", "/v1/streams/idle/snapshot")["snapshot"]["bytes"] == 0


def test_rollback_walks_back_and_reset_returns_to_the_source(tmp_path: Path) -> None:
    with live(tmp_path, snapshot_every=2) as server:
        for number in range(6):
            server.predict("cam", number, adapt="wait")
            server.wait_until_written()  # or a slow disk would get the newest alone
        assert [s["version"] for s in server.status("cam")["snapshots"]] == [6, 4, 2]
        for version in (4, 2):
            answer = server.good("POST", "/v1/streams/cam/rollback")
            assert answer["restored"]["version"] == version
            assert answer["durable"] is True
            assert answer["durable_through"] == answer["seq"]
            assert_same_state(state_on_disk(server.server, "cam"), expected(list(range(version))))
        refused = server.http.post("/v1/streams/cam/rollback")
        assert refused.status_code == 409
        assert "reset" in refused.json()["error"]["message"]
        assert server.good("POST", "/v1/streams/cam/rollback", json={"to": 6})["restored"]["version"] == 6
        assert server.http.post("/v1/streams/cam/rollback", json={"to": 77}).status_code == 409
        server.good("POST", "/v1/streams/cam/reset")
        assert_same_state(server.state("cam"), expected([]))


def test_a_manual_snapshot_outlives_the_automatic_ones(tmp_path: Path) -> None:
    with live(tmp_path, snapshot_every=1, keep_snapshots=2) as server:
        server.predict("cam", 0, adapt="wait")
        kept = server.good("POST", "/v1/streams/cam/snapshot")["snapshot"]["seq"]
        for number in range(1, 8):
            server.predict("cam", number, adapt="wait")
            server.wait_until_written()
        kinds = [s["kind"] for s in server.status("cam")["snapshots"]]
        assert kinds.count("auto") == 2
        assert kinds.count("manual") == 1
        server.good("POST", "/v1/streams/cam/rollback", json={"to": kept})
        assert_same_state(server.state("cam"), expected([0]))


def test_delete_forgets_and_the_name_starts_anew(tmp_path: Path) -> None:
    with live(tmp_path) as server:
        server.predict("cam", 0, adapt="wait")
        server.good("POST", "/v1/streams/cam/snapshot")
        assert server.good("DELETE", "/v1/streams/cam")["deleted"] is True
        assert server.good("GET", "/v1/streams")["total"] == 0
        assert not list((tmp_path / "streams").iterdir())
        for path in ("", "/events"):
            assert server.http.get(f"/v1/streams/cam{path}").status_code == 404
        for act in ("snapshot", "rollback", "reset"):
            assert server.http.post(f"/v1/streams/cam/{act}").status_code == 404
        assert server.predict("cam", 3, adapt="wait").json()["seq"] == 1
        assert_same_state(server.state("cam"), expected([3]))


def test_an_orderly_stop_loses_nothing(tmp_path: Path) -> None:
    with live(tmp_path, snapshot_every=1000) as server:
        for number in range(3):
            server.predict("cam", number)
            server.predict("Cam", 50 + number)  # another stream, also where the file system sees one name
    with live(tmp_path, snapshot_every=1000) as server:
        listed = {s["stream"]: s for s in server.good("GET", "/v1/streams")["streams"]}
        assert listed.keys() == {"cam", "Cam"}
        assert (listed["cam"]["adapted_batches"], listed["cam"]["images"]) == (3, 12)  # before it is used again
        assert server.status("Cam")["unsaved_batches"] == 0
        assert server.predict("cam", 3, adapt="wait").json()["seq"] == 4
        assert_same_state(server.state("cam"), expected([0, 1, 2, 3]))
        assert_same_state(server.state("Cam"), expected([50, 51, 52]))


def test_a_damaged_snapshot_is_refused_and_the_one_before_taken(tmp_path: Path) -> None:
    with live(tmp_path, snapshot_every=1) as server:
        for number in range(3):
            server.predict("cam", number, adapt="wait")
            server.wait_until_written()
    newest = max((tmp_path / "streams" / "cam").iterdir())
    data = bytearray((newest / "state.safetensors").read_bytes())
    data[-1] ^= 1
    (newest / "state.safetensors").write_bytes(data)
    with live(tmp_path) as server:
        assert server.status("cam")["adapted_batches"] == 3
        server.predict("cam", 9, adapt="off")
        assert_same_state(server.state("cam"), expected([0, 1]))
        assert server.status("cam")["adapted_batches"] == 2
        events = server.good("GET", "/v1/streams/cam/events")["events"]
        assert any(e["event"] == "snapshot_refused" and str(newest) in e["reason"] for e in events)
        assert "dpl_refused_snapshots_total 1.0" in server.http.get("/metrics").text
        assert server.status("cam")["seq"] > 3  # numbers are never given twice


def test_events_replayed_give_the_state(tmp_path: Path) -> None:
    with live(tmp_path, snapshot_every=2) as server:
        for number in range(5):
            server.http.post(
                "/v1/streams/cam/predict",
                content=batch(number).numpy().tobytes(),
                headers={
                    "Content-Type": "application/octet-stream",
                    "X-Shape": "4,3,32,32",
                    "X-Request-ID": f"b{number}",
                },
            )
        server.settled("cam")
        server.wait_until_written()
        server.good("POST", "/v1/streams/cam/rollback")
        events = server.good("GET", "/v1/streams/cam/events")["events"]
        replay = Replay(adaptive(), {f"b{n}": batch(n) for n in range(5)})
        assert_same_state(server.state("cam"), replay.run(events))


def test_two_servers_cannot_share_a_folder(tmp_path: Path) -> None:
    from dpl.core.errors import SettingError

    with live(tmp_path), pytest.raises(SettingError, match="in use by another server"):
        open_live(tmp_path)


def test_a_folder_of_another_model_is_refused(tmp_path: Path) -> None:
    from dpl.core.errors import SettingError

    with live(tmp_path):
        pass
    with pytest.raises(SettingError, match="of another model"):
        open_live(tmp_path, method="dpl")
