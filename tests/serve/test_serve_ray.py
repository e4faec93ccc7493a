"""`dpl serve --engine ray` on a real local cluster: two replicas, one of which is killed.

A cluster takes a minute or two to start, so `make abuse` runs this file and `make test` does not.
"""

import os
import signal
import threading
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import pytest
from live import Process, adaptive, assert_same_state, batch, live, raw, wait_for

from dpl.serve.ray import owner, replica_folder
from turns import my_turn

pytestmark = [
    pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed: pip install '.[ray]'"),
    pytest.mark.skipif("DPL_SLOW_TESTS" not in os.environ, reason="slow: run by make abuse (DPL_SLOW_TESTS=1)"),
    pytest.mark.timeout(600),
]
STREAMS = ("cam-0", "cam-1", "cam-2", "cam-3")
EVERY = 3
GUARD = {"limit": 1e9}  # it never freezes, so that every batch is one adapted to
HANGING = """
import time
from dpl.backbones.cifar import DebugCNN

class Hanging(DebugCNN):
    def __init__(self, num_classes=10):
        super().__init__(num_classes)

    def forward(self, images):
        if len(images) == 7:
            time.sleep(1000)
        return super().forward(images)
"""  # a network that sleeps over every batch of seven images


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ray")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Process]:
    (folder / "hanging.py").write_text(HANGING)
    with my_turn("ray"), pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)  # the replicas inherit it
        running = start(folder)
        yield running
        if running.process.poll() is None:
            running.stop()


def start(folder: Path) -> Process:
    """Ray itself gives its parts 30 seconds to start; a machine with much else to do may need another try."""
    options = ("--engine", "ray", "--replicas", "2", "--replica-cpus", "0.5", "--snapshot-every", str(EVERY))
    options += (
        "--guard-set",
        "limit=1e9",
        "--workers",
        "2",
        "--stop-seconds",
        "10",
        "--network",
        "hanging:Hanging",
        "--size",
        "32",
    )
    for _ in range(2):
        try:
            return Process(folder, *options, "--live-models", "2", "--latency-budget", "60")
        except AssertionError as error:
            if "node timed out during startup" not in str(error):
                raise
    pytest.skip("twice Ray could not start in its own time limit: this machine is overloaded")


@pytest.fixture
def http(server: Process) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=120) as client:
        yield client


def predict(http: httpx.Client, stream: str, number: int) -> dict[str, Any]:
    query = {"adapt": "wait", "probabilities": "true"}
    answer = http.post(f"/v1/streams/{stream}/predict", params=query, **raw(batch(number)))
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_same_answers_as_the_plain_server_and_streams_stick(http: httpx.Client, tmp_path: Path) -> None:
    runs: dict[str, set[str]] = {stream: set() for stream in STREAMS}
    with live(tmp_path, guard=GUARD, snapshot_every=EVERY) as single:
        for number in range(4):
            for stream in STREAMS:
                one = single.predict(stream, number, adapt="wait", probabilities=True).json()
                two = predict(http, stream, number)
                assert [row["probabilities"] for row in two["predictions"]] == [
                    row["probabilities"] for row in one["predictions"]
                ]
                assert two["seq"] == one["seq"]
                runs[stream].add(two["run"])
    replicas = [http.get(f"/v1/server?replica={index}").json()["run"] for index in range(2)]
    assert len(set(replicas)) == 2
    for stream in STREAMS:
        assert runs[stream] == {replicas[owner(stream, 2)]}
    assert {s["stream"] for s in http.get("/v1/streams").json()["streams"]} == set(STREAMS)
    assert http.get("/", headers={"X-Request-ID": "mine"}).headers["x-request-id"] == "mine"
    assert http.post("/v1/streams/.x/predict").status_code == 422


def test_a_killed_replica_comes_back_with_its_streams(http: httpx.Client) -> None:
    """Up to `durable_through` everything is there again; the other replica has not noticed."""
    lost = next(stream for stream in STREAMS if owner(stream, 2) == 0)
    kept = next(stream for stream in STREAMS if owner(stream, 2) == 1)
    before, other = predict(http, lost, 4), predict(http, kept, 4)
    assert before["durable_through"] >= EVERY
    victim = http.get("/v1/server?replica=0").json()["process"]
    os.kill(victim, signal.SIGKILL)
    start = time.monotonic()
    assert predict(http, kept, 5)["run"] == other["run"]
    while (answer := http.get(f"/v1/streams/{lost}")).status_code != 200:
        assert answer.status_code == 503
        assert time.monotonic() - start < 300
        time.sleep(0.2)
    print(f"replica back after {time.monotonic() - start:.1f} s")
    status = answer.json()
    assert before["durable_through"] <= status["seq"] <= before["seq"]
    number = status["adapted_batches"]
    after = predict(http, lost, number)
    assert after["run"] != before["run"]
    assert after["seq"] == status["seq"] + 1
    model = adaptive(guard=GUARD)
    for i in range(number):
        model(batch(i))
    wanted = model(batch(number)).softmax(dim=1)
    assert [row["probabilities"] for row in after["predictions"]] == wanted.tolist()


def test_an_orderly_stop_saves_every_stream_even_if_a_step_hangs(
    server: Process, http: httpx.Client, folder: Path
) -> None:
    statuses: list[int] = []

    def ask() -> None:
        statuses.append(http.post("/v1/streams/stuck/predict", **raw(batch(0, 7))).status_code)

    stuck = threading.Thread(target=ask)
    stuck.start()
    wait_for(lambda: http.get("/v1/streams/stuck").json().get("waiting") == 1)
    counts = {stream: http.get(f"/v1/streams/{stream}").json()["adapted_batches"] for stream in STREAMS}
    start = time.monotonic()
    server.stop()
    print(f"stopped after {time.monotonic() - start:.1f} s")
    stuck.join(60)
    assert statuses == [503]
    for index in range(2):
        with live(replica_folder(folder / "state", index, 2), guard=GUARD) as single:
            for stream in (stream for stream in STREAMS if owner(stream, 2) == index):
                assert single.status(stream)["adapted_batches"] == counts[stream]
                model = adaptive(guard=GUARD)
                for i in range(counts[stream]):
                    model(batch(i))
                assert_same_state(single.state(stream), model.state_dict())
