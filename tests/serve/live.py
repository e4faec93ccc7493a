"""A real server on a real socket, in this process or in one of its own, and a replay of what it did."""

import json
import math
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import torch
import uvicorn
from safetensors.torch import save_file
from torch import Tensor, nn

import dpl
from dpl.backbones import create
from dpl.data import square
from dpl.model.adaptive import AdaptiveModel
from dpl.serve.app import make_app
from dpl.serve.live import SourceState, same_bits
from dpl.serve.middleware import limited_protocol
from dpl.serve.server import Server
from dpl.serve.settings import ServeSettings

SHAPE = (3, 32, 32)
NAMES = tuple(f"class {i}" for i in range(10))


@cache
def network() -> nn.Module:
    """A random network whose classifier is sharpened and centred: it is sure, and of different classes."""
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(0)
        net = create("debug_cnn")
        inputs: list[Tensor] = []
        handle = net.fc.register_forward_pre_hook(lambda _layer, args: inputs.append(args[0]))
        net(torch.cat([batch(number) for number in range(8)]))
        handle.remove()
        features = inputs[0] - inputs[0].mean(dim=0)
        net.fc.weight *= 8 / (features @ net.fc.weight.T).std()
        net.fc.bias.copy_(-net.fc.weight @ inputs[0].mean(dim=0))
        return net.to(memory_format=torch.channels_last)  # as `dpl serve` has it: the last digits depend on it


def adaptive(method: str = "tent", guard: bool | dict[str, float] = False) -> AdaptiveModel:
    return dpl.adapt(network(), method, guard=guard)


def batch(number: int, images: int = 4) -> Tensor:
    generator = torch.Generator().manual_seed(number)
    base = torch.rand(images, 3, 1, 1, generator=generator)
    return (base + 0.3 * torch.rand(images, *SHAPE, generator=generator)).clamp(0, 1)


def raw(images: Tensor) -> dict[str, Any]:
    """The arguments of a request that sends an array."""
    shape = ",".join(map(str, images.shape))
    return {
        "content": images.numpy().astype("<f4").tobytes(),
        "headers": {"Content-Type": "application/octet-stream", "X-Shape": shape},
    }


@dataclass
class Live:
    """A running server and a client of it."""

    server: Server
    http: httpx.Client
    port: int

    def predict(self, stream: str, number: int, **query: Any) -> httpx.Response:
        return self.http.post(f"/v1/streams/{stream}/predict", params=query, **raw(batch(number)))

    def good(self, method: str, path: str, **arguments: Any) -> dict[str, Any]:
        answer = self.http.request(method, path, **arguments)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def status(self, stream: str) -> dict[str, Any]:
        return self.good("GET", f"/v1/streams/{stream}")

    def settled(self, stream: str) -> dict[str, Any]:
        """Wait until nothing is adapted or written any more, then return the status."""
        known = self.server.find(stream)
        wait_for(lambda: not known.running and not self.server.admitted(known))
        return self.status(stream)

    def wait_until_written(self) -> None:
        """Wait until every snapshot that waits was written, or could not be."""
        writer = self.server.writer

        def is_idle() -> bool:
            with writer._changed:
                return not writer._tasks and writer._began == math.inf

        wait_for(is_idle)

    def state(self, stream: str) -> dict[str, Tensor]:
        """The stream's full state, by way of a snapshot on disk."""
        self.good("POST", f"/v1/streams/{stream}/snapshot")
        return state_on_disk(self.server, stream)


def state_on_disk(server: Server, stream: str) -> dict[str, Tensor]:
    saved, problems = server.store.newest(stream)
    assert saved is not None, problems
    return server.source.restored(saved.difference)


def open_live(
    folder: Path, *, method: str = "tent", guard: bool = False, tokens: Any = None, **settings: Any
) -> Server:
    chosen = {"live_models": 2, "latency_budget": 60.0, **settings}
    limits = ServeSettings(state=folder, **chosen)
    return Server(lambda: adaptive(method, guard), square(32), SHAPE, limits, names=NAMES, tokens=tokens)


@contextmanager
def live(folder: Path, *, token: str | None = None, **settings: Any) -> Iterator[Live]:
    """Run a server in a thread of this process."""
    torch.set_num_threads(1)
    server = open_live(folder, **settings)
    place = socket.create_server(("127.0.0.1", 0))
    protocol = limited_protocol(server.settings)
    config = uvicorn.Config(make_app(server), http=protocol, ws="none", log_level="error", timeout_graceful_shutdown=5)
    runner = uvicorn.Server(config)
    thread = threading.Thread(target=runner.run, kwargs={"sockets": [place]})
    thread.start()
    port = place.getsockname()[1]
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    try:
        wait_for(lambda: runner.started)
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30, headers=headers) as http:
            yield Live(server, http, port)
    finally:
        runner.should_exit = True
        thread.join()


def wait_for(condition: Any, seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "did not happen in time"
        time.sleep(0.005)


class Process:
    """`dpl serve` in a process of its own."""

    def __init__(
        self, folder: Path, *options: str, method: str = "tent", prelude: str = "", source: Path | None = None
    ) -> None:
        """`prelude` is code that the process runs first; `source` is the folder of another version of the package."""
        weights = folder / "weights.safetensors"
        if not weights.exists():
            folder.mkdir(parents=True, exist_ok=True)
            save_file({key: value.contiguous() for key, value in network().state_dict().items()}, weights)
        command = [sys.executable, "-c", f"{prelude}\nimport dpl.cli, sys; sys.exit(dpl.cli.main())", "serve", "--json"]
        command += ["--model", str(weights), "--network", "debug_cnn"]
        command += ["--method", method, "--state", str(folder / "state"), "--port", "0", "--threads", "1", *options]
        self.log = (folder / "log.txt").open("ab")
        start = time.monotonic()
        environment = {**os.environ, "OMP_NUM_THREADS": "1", **({"PYTHONPATH": str(source)} if source else {})}
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=self.log, env=environment)
        self.about = self._first_document()
        self.url = self.about["url"]
        with httpx.Client(base_url=self.url) as http:
            wait_for(lambda: _is_ready(http), 300)
        self.seconds_to_start = time.monotonic() - start

    def _first_document(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        text = ""
        for line in self.process.stdout:
            text += line.decode()
            if line.startswith(b"}"):
                return json.loads(text)
        raise AssertionError(f"the server ended: {text} {Path(self.log.name).read_text()}")

    def kill(self) -> None:
        self.process.kill()
        self._clean_up()

    def stop(self) -> None:
        self.process.terminate()
        self._clean_up()

    def _clean_up(self) -> None:
        self.process.wait(timeout=120)
        assert self.process.stdout is not None
        self.process.stdout.close()
        self.log.close()


def _is_ready(http: httpx.Client) -> bool:
    try:
        return http.get("/readyz").status_code == 200
    except httpx.TransportError:
        return False


class Replay:
    """Does in one thread, in the logged order, what a server did with a stream."""

    def __init__(self, model: AdaptiveModel, batches: Mapping[str, Tensor]) -> None:
        self.model, self.batches = model, batches
        model.predict(batch(0))
        self.versions = {0: model.state_dict()}
        self.first: dict[str, Tensor] = {}  # the prediction before a step
        self.after: dict[str, Tensor] = {}  # the answer of the step; the guard may have chosen another

    def run(self, events: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        for event in sorted(events, key=lambda event: event["seq"]):
            if event["event"] == "predict":
                self._predict(event)
            elif event["event"] == "rollback":
                self.model.load_state_dict(self.versions[event["version"]])
            elif event["event"] == "reset":
                self.model.reset()
        return self.model.state_dict()

    def _predict(self, event: Mapping[str, Any]) -> None:
        images = self.batches[event["request_id"]]
        self.first[event["request_id"]] = self.model.predict(images).softmax(dim=1)
        if event["adaptation"] == "adapted":
            self.after[event["request_id"]] = self.model(images).softmax(dim=1)
            self.versions[event["seq"]] = self.model.state_dict()


def assert_same_state(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> None:
    assert set(one) == set(other)
    different = [key for key in one if not same_bits(one[key], other[key])]
    assert not different, different[:5]


__all__ = ["NAMES", "SHAPE", "Live", "Process", "Replay", "SourceState", "adaptive", "assert_same_state", "batch",
           "live", "network", "open_live", "raw", "state_on_disk", "wait_for"]  # fmt: skip
