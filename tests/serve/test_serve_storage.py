"""A full or read-only disk: predictions go on, what cannot be saved is said, and is saved as soon as it can be."""

import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from itertools import cycle
from pathlib import Path

import pytest
from live import Live, adaptive, assert_same_state, batch, live, state_on_disk, wait_for
from torch import Tensor

from dpl.serve.store import Difference


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own, of 512 kB."""
    place = tmp_path / "disk"
    place.mkdir()
    mounted = shutil.which("mount") and subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", str(place)], capture_output=True
    )
    if not mounted or mounted.returncode:
        pytest.skip("a small file system cannot be mounted here (needs root)")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def fill(disk: Path) -> Path:
    filler = disk / "filler"
    with filler.open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(4096))
    return filler


def healthy(server: Live) -> bool:
    return server.good("GET", "/healthz")["status"] == "ok"


def expected(*numbers: int) -> dict:
    model = adaptive()
    for number in numbers:
        model(batch(number))
    return model.state_dict()


def test_a_full_disk(disk: Path) -> None:
    """Adaptation goes on by default; the state is on disk once there is room again, without being asked for."""
    with live(disk / "state", snapshot_every=1) as server:
        server.predict("cam", 0, adapt="wait")
        server.wait_until_written()
        filler = fill(disk)
        answer = server.predict("cam", 1, adapt="wait").json()
        assert answer["adaptation"]["status"] == "done"
        wait_for(lambda: not healthy(server))
        later = server.predict("cam", 2, adapt="wait").json()
        assert later["durable_through"] == 1, "nothing after the first batch is on disk"
        problems = server.good("GET", "/healthz")["problems"]
        assert "No space left" in problems[0]
        assert "goes on" in problems[0]
        assert "dpl_storage_ok 0.0" in server.http.get("/metrics").text
        refused = server.http.post("/v1/streams/cam/snapshot")
        assert refused.status_code == 503
        assert "retry-after" in refused.headers
        assert server.good("POST", "/v1/streams/cam/reset")["durable"] is False
        server.predict("cam", 3, adapt="wait")
        filler.unlink()
        wait_for(lambda: healthy(server) and server.status("cam")["unsaved_batches"] == 0)
        assert_same_state(state_on_disk(server.server, "cam"), expected(3))
        assert not list((disk / "state" / "streams" / "cam").glob(".*"))


def test_adaptation_can_stop_while_the_disk_is_full(disk: Path) -> None:
    with live(disk / "state", snapshot_every=1, on_storage_failure="stop") as server:
        filler = fill(disk)
        server.predict("cam", 0, adapt="wait")
        wait_for(lambda: not healthy(server))
        answer = server.predict("cam", 1, adapt="wait").json()
        assert answer["adaptation"]["status"] == "skipped"
        assert "state folder" in answer["adaptation"]["reason"]
        assert len(answer["predictions"]) == 4
        assert "paused" in server.good("GET", "/healthz")["problems"][0]
        filler.unlink()
        wait_for(lambda: healthy(server))
        assert server.predict("cam", 2, adapt="wait").json()["adaptation"]["status"] == "done"
        assert_same_state(server.state("cam"), expected(0, 2))


def test_a_read_only_disk_with_streams_of_an_earlier_run(disk: Path) -> None:
    with live(disk / "state") as server:
        server.predict("cam", 0, adapt="wait")
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    with live(disk / "state", live_models=1, max_streams_in_memory=1) as server:
        answer = server.predict("cam", 1, adapt="wait")
        assert answer.json()["seq"] == 2  # what was saved is known
        assert server.http.post("/v1/streams/cam/snapshot").status_code == 503
        assert "Read-only" in server.good("GET", "/healthz")["problems"][0]
        full = server.predict("other", 1)  # there is no room in memory, and none can be made
        assert full.status_code == 503
        assert "memory is full" in full.json()["error"]["message"]
        assert server.predict("cam", 2).status_code == 200
        subprocess.run(["mount", "-o", "remount,rw", str(disk)], check=True)
        wait_for(lambda: healthy(server))
        assert server.predict("other", 1).status_code == 200
        assert_same_state(server.state("cam"), expected(0, 1, 2))


def test_a_folder_that_is_in_the_way(tmp_path: Path) -> None:
    """Needs no mount: a file lies where the stream's folder should be."""
    with live(tmp_path, snapshot_every=1) as server:
        (tmp_path / "streams" / "cam").write_text("in the way")
        answers = [server.predict("cam", number, adapt="wait").json() for number in range(3)]
        assert [answer["adaptation"]["status"] for answer in answers] == ["done"] * 3
        wait_for(lambda: not healthy(server))
        assert server.status("cam")["unsaved_batches"] == 3
        (tmp_path / "streams" / "cam").unlink()
        wait_for(lambda: healthy(server))
        assert_same_state(server.state("cam"), expected(0, 1, 2))


def test_spilling_to_a_full_disk_keeps_the_stream_in_memory(disk: Path) -> None:
    with live(disk / "state", live_models=1, max_streams_in_memory=1, snapshot_every=1000) as server:
        server.predict("a", 0, adapt="wait")
        filler = fill(disk)
        assert server.predict("b", 1, adapt="wait").status_code == 200
        wait_for(lambda: not healthy(server))
        assert server.predict("a", 2, adapt="wait").status_code == 200
        filler.unlink()
        wait_for(lambda: healthy(server))
        assert_same_state(server.state("a"), expected(0, 2))
        assert_same_state(server.state("b"), expected(1))


def test_a_link_takes_the_place_of_the_folder(tmp_path: Path) -> None:
    """What is written afterwards is where the link leads; a new server finds it there."""
    place = tmp_path / "state"
    with live(place, snapshot_every=1) as server:
        server.predict("cam", 0, adapt="wait")
        server.wait_until_written()
        place.rename(tmp_path / "away")
        (tmp_path / "elsewhere").mkdir()
        place.symlink_to(tmp_path / "elsewhere")
        server.predict("cam", 1, adapt="wait")
        assert_same_state(server.state("cam"), expected(0, 1))
        assert healthy(server)
    with live(tmp_path / "elsewhere") as server:
        assert server.predict("cam", 2, adapt="wait").json()["seq"] > 2
        assert_same_state(server.state("cam"), expected(0, 1, 2))


def test_a_clock_that_jumps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The time of day jumps by a year, forward and back; streams that come and go keep their states."""
    now, jumps = time.time, cycle((0.0, 3e7, -3e7))
    monkeypatch.setattr(time, "time", lambda: now() + next(jumps))
    with live(tmp_path, live_models=1, max_streams_in_memory=1) as server:
        for number in range(3):
            for stream in ("a", "b", "c"):
                assert server.predict(stream, number, adapt="wait").status_code == 200
        assert server.good("GET", "/v1/streams")["total"] == 3
        assert healthy(server)
        for stream in ("a", "b", "c"):
            assert_same_state(server.state(stream), expected(0, 1, 2))


def test_a_stream_that_cannot_be_saved_at_a_stop_costs_no_other(tmp_path: Path) -> None:
    with live(tmp_path, snapshot_every=1000) as server:
        for stream in ("a", "b"):
            server.predict(stream, 0, adapt="wait")
        source = server.server.source
        take = source.difference

        def fail_once(state: Mapping[str, Tensor]) -> Difference:
            source.difference = take
            raise MemoryError("no room for the difference")

        source.difference = fail_once
    with live(tmp_path) as server:
        (saved,) = server.good("GET", "/v1/streams")["streams"]
        assert_same_state(server.state(saved["stream"]), expected(0))
