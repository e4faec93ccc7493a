"""kill -9 under load: back from the last acknowledged snapshot, with nothing lost that was called durable."""

import json
import resource
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from itertools import product
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest
from live import Process, adaptive, assert_same_state, batch, raw, wait_for

from dpl.serve.store import StreamStore

EVERY = 3
STREAMS = ("cam-a", "cam-b")


class Camera(threading.Thread):
    """Sends batch after batch to one stream until the server is gone, and keeps the answers."""

    def __init__(self, url: str, stream: str) -> None:
        super().__init__()
        self.url, self.stream = url, stream
        self.answers: list[dict] = []
        self.start()

    def run(self) -> None:
        with httpx.Client(base_url=self.url, timeout=30) as http:
            for number in range(100_000):
                try:
                    answer = http.post(f"/v1/streams/{self.stream}/predict?adapt=wait", **raw(batch(number)))
                except httpx.TransportError:
                    return
                assert answer.status_code == 200, answer.text
                self.answers.append(answer.json())


def state_of(folder: Path, stream: str) -> tuple[int, dict]:
    """Read a stream's newest state with the program's own reader, while no server runs."""
    from dpl.serve.live import SourceState

    identity = json.loads((folder / "state" / "model.json").read_text())
    store = StreamStore(folder / "state", identity, keep=5)
    try:
        saved, problems = store.newest(stream)
    finally:
        store.close()
    assert saved is not None
    assert not problems
    return saved.seq, SourceState(adaptive(guard=True).state_dict()).restored(saved.difference)


def after(steps: int) -> dict:
    model = adaptive(guard=True)
    for number in range(steps):
        model(batch(number))
    return model.state_dict()


def test_killed_under_load_full_disk_and_stopped(tmp_path: Path) -> None:
    server = Process(tmp_path, "--snapshot-every", str(EVERY), "--journal", str(tmp_path / "journal.jsonl"))
    cameras = [Camera(server.url, stream) for stream in STREAMS]
    wait_for(
        lambda: all(len(camera.answers) > 10 and camera.answers[-1]["durable_through"] >= EVERY for camera in cameras),
        120,
    )
    server.kill()
    for camera in cameras:
        camera.join()

    # What was acknowledged as durable is on disk, exact to the bit.
    for camera in cameras:
        acknowledged = camera.answers[-1]["durable_through"]
        assert camera.answers[-1]["snapshot_every"] == EVERY
        seq, state = state_of(tmp_path, camera.stream)
        assert acknowledged <= seq <= camera.answers[-1]["seq"] + 1
        assert acknowledged >= EVERY
        assert_same_state(state, after(seq))

    # A new process goes on from there; it may take as long as the first one did, at most ten seconds more.
    again = Process(tmp_path, "--snapshot-every", str(EVERY))
    assert again.seconds_to_start < max(10.0, 2 * server.seconds_to_start)
    with httpx.Client(base_url=again.url, timeout=30) as http:
        for camera in cameras:
            known = http.get(f"/v1/streams/{camera.stream}").json()["seq"]
            answer = http.post(f"/v1/streams/{camera.stream}/predict?adapt=wait", **raw(batch(known))).json()
            assert answer["seq"] == known + 1
            assert answer["run"] != camera.answers[-1]["run"]
        _disk_fails_for_a_while(http, again)
        seq = http.get(f"/v1/streams/{STREAMS[0]}").json()["seq"]
    again.stop()  # SIGTERM: everything is saved, whatever the interval
    assert not list((tmp_path / "state").rglob("*.tmp"))
    saved, state = state_of(tmp_path, STREAMS[0])
    assert saved == seq
    assert_same_state(state, after(seq))
    lines = [json.loads(line) for line in (tmp_path / "journal.jsonl").read_text().splitlines()]
    assert sum(line["event"] == "predict" and line["stream"] == STREAMS[0] for line in lines) >= len(cameras[0].answers)


def _disk_fails_for_a_while(http: httpx.Client, server: Process) -> None:
    """The system lets the server write no file of more than 100 bytes, then lifts that again."""
    limits = resource.prlimit(server.process.pid, resource.RLIMIT_FSIZE)
    resource.prlimit(server.process.pid, resource.RLIMIT_FSIZE, (100, limits[1]))
    start = http.get(f"/v1/streams/{STREAMS[0]}").json()["seq"]
    for number in range(start, start + 2 * EVERY):
        answer = http.post(f"/v1/streams/{STREAMS[0]}/predict?adapt=wait", **raw(batch(number)))
        assert answer.status_code == 200
    wait_for(lambda: http.get("/healthz").json()["status"] == "degraded")
    resource.prlimit(server.process.pid, resource.RLIMIT_FSIZE, limits)
    wait_for(lambda: http.get("/healthz").json()["status"] == "ok")


HANGS = """
import time, torch
def sleep(layer, inputs):
    if isinstance(layer, torch.nn.Conv2d) and len(inputs[0]) == 7:
        time.sleep(1000)
torch.nn.modules.module.register_module_forward_pre_hook(sleep)
"""  # in a network that sleeps over every batch of seven images


@pytest.mark.parametrize(("number", "workers", "waiting"), [(signal.SIGTERM, 1, 2), (signal.SIGINT, 2, 1)])
def test_a_step_that_hangs_delays_no_stop_and_costs_no_other_stream(
    tmp_path: Path, number: signal.Signals, workers: int, waiting: int
) -> None:
    """Before the time of the request that waits behind the step is over, or after that."""
    options = ["--stop-seconds", "4", "--workers", str(workers), "--snapshot-every", "1000", "--latency-budget", "60"]
    options += ["--timeout", "6"]
    server = Process(tmp_path, *options, prelude=HANGS)
    with ThreadPoolExecutor() as threads, httpx.Client(base_url=server.url, timeout=60) as http:
        try:
            for step, stream in product(range(3), STREAMS):
                http.post(f"/v1/streams/{stream}/predict?adapt=wait", **raw(batch(step))).raise_for_status()
            stuck = [threads.submit(http.post, "/v1/streams/stuck/predict", **raw(batch(3, 7))) for _ in range(2)]
            for count in range(2, waiting - 1, -1):
                wait_for(lambda count=count: http.get("/v1/streams/stuck").json().get("waiting") == count)
            start = time.monotonic()
            server.process.send_signal(number)
            server.process.wait(30)
            seconds = time.monotonic() - start
        finally:
            server.kill()
    assert seconds < 8  # a busy machine may add some
    assert [(answer.result().status_code, answer.result().headers["Retry-After"]) for answer in stuck] == [
        (503, "5")
    ] * 2
    assert "Traceback" not in (tmp_path / "log.txt").read_text()
    for stream in STREAMS:
        seq, state = state_of(tmp_path, stream)
        assert seq == 3
        assert_same_state(state, after(3))


def test_a_program_that_runs_the_command_lives_on_after_its_stop(tmp_path: Path) -> None:
    """The time of a stop is for a step that hangs; here none does."""
    lives = "import atexit, time; atexit.register(lambda: (time.sleep(5), print('alive', flush=True)))"
    server = Process(tmp_path, "--stop-seconds", "4", prelude=lives)
    body, kind = json.dumps({"arrays": batch(0).tolist()}), {"Content-Type": "application/json"}
    httpx.post(f"{server.url}/v1/streams/cam/predict", content=body, headers=kind, timeout=60)  # decoders have started
    server.process.send_signal(signal.SIGINT)
    assert server.process.stdout is not None
    assert server.process.stdout.read() == b"alive\n"
    server.kill()


def test_few_open_files_and_for_a_while_no_memory(tmp_path: Path) -> None:
    """As after `ulimit -n 64`, and with no more address space than the process has."""
    files = "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))"
    server = Process(tmp_path, "--latency-budget", "60", "--max-batch", "1024", prelude=files)
    address = (urlsplit(server.url).hostname, urlsplit(server.url).port)
    with ExitStack() as stack, httpx.Client(base_url=server.url, timeout=60) as http:
        try:
            for _ in range(80):
                stack.enter_context(socket.create_connection(address))
            path, limits = f"/v1/streams/{STREAMS[0]}", resource.prlimit(server.process.pid, resource.RLIMIT_AS)
            http.post(f"{path}/predict?adapt=wait", **raw(batch(0))).raise_for_status()
            used = int(Path(f"/proc/{server.process.pid}/statm").read_text().split()[0]) * resource.getpagesize()
            resource.prlimit(server.process.pid, resource.RLIMIT_AS, (used, limits[1]))
            with suppress(httpx.RemoteProtocolError):  # refused while the body is read, or in the step
                answer = http.post(f"{path}/predict?adapt=wait", **raw(batch(1, 1024)))
                assert answer.status_code == 500
            resource.prlimit(server.process.pid, resource.RLIMIT_AS, limits)
            http.post(f"{path}/predict?adapt=wait", **raw(batch(1))).raise_for_status()
            assert http.get("/healthz").json()["status"] == "ok"
            server.stop()
        finally:
            server.kill()
    assert_same_state(state_of(tmp_path, STREAMS[0])[1], after(2))


def test_wrong_options_end_with_one_line(tmp_path: Path, capsys) -> None:
    from dpl.cli import main

    state = ["--state", str(tmp_path / "state"), "--port", "0"]
    for options, hint in [
        (["--model", "debug_cnn", "--workers", "0", *state], "workers=0"),
        (["--model", "debug_cnn", "--live-models", "1", "--workers", "2", *state], "live_models"),
        (["--model", "debug_cnn", "--max-streams-in-memory", "1", *state], "max_streams_in_memory"),
        (["--model", "debug_cnn", "--token-file", str(tmp_path / "none"), *state], "No such file"),
        (["--model", "debug_cnn", "--tls-cert", "x", *state], "--tls-key"),
        (["--model", "debug_cnn", "--host", "256.1.1.1", "--port", "0"], "token"),
        (["--model", "debug_cnn", "--threads", "0", *state], "--threads: 0: expected a whole number"),
        (["--model", "no_such_network", *state], "no_such_network"),
        (["--model", "debug_cnn", *state], "--random-weights"),
        (["--model", "debug_cnn", "--random-weights", "--method", "dlp", *state], "Did you mean"),
        (["--model", "debug_cnn", "--random-weights", "--set", "lrr=1", *state], "lrr"),
        (["--model", str(tmp_path), *state], "--network"),
    ]:
        assert main(["serve", *options]) == 2, options
        error = capsys.readouterr().err.strip().splitlines()[-1]
        assert error.startswith("dpl serve: "), error
        assert hint in error, error
    assert not (tmp_path / "state" / "streams").exists()


def test_a_port_in_use_is_told(tmp_path: Path, capsys) -> None:
    import socket

    from dpl.cli import main

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert main(["serve", "--model", "debug_cnn", "--port", port, "--state", str(tmp_path / "s")]) == 2
    assert f"--port {port}" in capsys.readouterr().err
