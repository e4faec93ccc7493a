"""A server in several replicas, without Ray: the same responses, and one owner and one writer for each stream."""

import asyncio
import dataclasses
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import pytest
import uvicorn
from hostile import MEGABYTE, attacks, refused
from live import NAMES, SHAPE, adaptive, assert_same_state, batch, live, raw, state_on_disk, wait_for
from starlette.responses import Response
from starlette.types import Scope
from torch import Tensor, nn

from dpl.core.errors import SettingError
from dpl.data import square
from dpl.serve.app import make_app
from dpl.serve.middleware import RequestFilter, Tokens, replay
from dpl.serve.monitoring import Metrics
from dpl.serve.ray import Replica, Router, call_app, owner, replica_folder
from dpl.serve.schemas import Overloaded
from dpl.serve.server import Server
from dpl.serve.settings import ServeSettings
from dpl.serve.store import check_replicas

STREAMS = ("cam-0", "cam-1", "cam-2", "cam-3")
SECRET = "a-long-enough-secret"
SETTINGS = {"live_models": 1, "latency_budget": 60.0, "max_body": 4 * MEGABYTE}


def open_replica(state: Path, index: int, tokens: Tokens | None = None) -> Server:
    settings = ServeSettings(state=replica_folder(state, index, 2), **SETTINGS)
    return Server(adaptive, square(32), SHAPE, settings, names=NAMES, tokens=tokens)


@contextmanager
def routed(state: Path, tokens: Tokens | None = None) -> Iterator[tuple[httpx.Client, list[Server], set[int]]]:
    """Two replicas in this process behind a router on a real socket; those in the set are unavailable."""
    unavailable: set[int] = set()
    with ExitStack() as stack:
        replicas = []
        for index in range(2):
            replicas.append(open_replica(state, index, tokens))
            stack.callback(replicas[-1].close)
        apps = [make_app(replica) for replica in replicas]

        async def ask(index: int, scope: Scope, body: bytes) -> Response:
            if index in unavailable:
                raise Overloaded(503, "unavailable", 2)
            return await call_app(apps[index], scope, replay(body))

        router = RequestFilter(Router(ask, 2), replicas[0].settings, tokens, Metrics())
        place = socket.create_server(("127.0.0.1", 0))
        runner = uvicorn.Server(uvicorn.Config(router, log_level="error", lifespan="off"))
        thread = threading.Thread(target=runner.run, kwargs={"sockets": [place]})
        thread.start()
        wait_for(lambda: runner.started)
        url = f"http://127.0.0.1:{place.getsockname()[1]}"
        headers = {"Authorization": f"Bearer {SECRET}"} if tokens else {}
        with httpx.Client(base_url=url, timeout=30, headers=headers) as http:
            yield http, replicas, unavailable
        runner.should_exit = True
        thread.join()


def test_owners_are_the_same_everywhere_and_evenly_spread() -> None:
    assert [owner(name, 5) for name in ("a", "b", "c", "camera-7")] == [0, 1, 0, 0]
    owners = [owner(f"camera-{i}", 3) for i in range(3000)]
    counts = [owners.count(replica) for replica in range(3)]
    assert all(850 < count < 1150 for count in counts), counts


def test_same_responses_as_one_server_and_each_stream_at_its_owner(tmp_path: Path) -> None:
    with routed(tmp_path / "two") as (http, replicas, _), live(tmp_path / "one") as single:
        for number in range(4):
            for stream in STREAMS:
                query = {"adapt": "wait", "probabilities": "true"}
                one = single.predict(stream, number, **query).json()
                two = http.post(f"/v1/streams/{stream}/predict", params=query, **raw(batch(number))).json()
                assert two["predictions"] == one["predictions"]
                assert (two["seq"], two["stream"]) == (one["seq"], stream)
        for stream in STREAMS:
            http.post(f"/v1/streams/{stream}/snapshot").raise_for_status()
            assert_same_state(state_on_disk(replicas[owner(stream, 2)], stream), single.state(stream))
        held = [{stream.id for stream in replica.streams()} for replica in replicas]
        assert held == [{stream for stream in STREAMS if owner(stream, 2) == index} for index in range(2)]
        assert all(held)


def test_lists_are_joined_and_other_pages_are_those_of_one_replica(tmp_path: Path) -> None:
    with routed(tmp_path) as (http, _, unavailable):
        for stream in STREAMS:
            http.post(f"/v1/streams/{stream}/predict", **raw(batch(1))).raise_for_status()
        listed = http.get("/v1/streams").json()
        assert {s["stream"] for s in listed["streams"]} == set(STREAMS)
        assert listed["total"] == 4
        assert http.get("/v1/streams?limit=x").status_code == 422
        for index in range(2):
            owned = sum(owner(stream, 2) == index for stream in STREAMS)
            assert f"dpl_images_total {4.0 * owned}" in http.get(f"/metrics?replica={index}").text
        for replica in ("2", "-1", "x", ""):
            assert http.get(f"/v1/server?replica={replica}").status_code == 422
        assert http.get("/v1/server").json()["method"] == "tent"
        assert "dpl serve" in http.get("/").text
        assert http.get("/nothing").status_code == 404

        unavailable.add(0)
        lost = next(s for s in STREAMS if owner(s, 2) == 0)
        kept = next(s for s in STREAMS if owner(s, 2) == 1)
        response = http.post(f"/v1/streams/{lost}/predict", **raw(batch(2)))
        assert response.status_code == 503
        assert response.headers["retry-after"] == "2"
        assert http.post(f"/v1/streams/{kept}/predict", **raw(batch(2))).status_code == 200
        assert http.get("/v1/streams").status_code == 503
        assert http.get("/healthz").status_code == 503
        assert http.get("/healthz?replica=1").status_code == 200


def test_the_router_refuses_what_one_server_refuses(tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    with routed(tmp_path / "state") as (http, replicas, _):
        http.post("/v1/streams/known/predict", **raw(batch(1))).raise_for_status()
        for attack in list(attacks(trace))[::3]:
            refused(str(http.base_url), attack)
        assert sum(len(replica.streams()) for replica in replicas) == 1
    assert not trace.exists()


def test_tokens_and_prefixes_hold_behind_the_router(tmp_path: Path) -> None:
    tokens = Tokens([(SECRET, ""), ("the-secret-of-site-a", "a-")])
    with routed(tmp_path, tokens) as (http, _, _):
        assert http.get("/v1/streams", headers={"Authorization": ""}).status_code == 401
        for name in ("a-1", "b-1"):
            arguments = raw(batch(1))
            assert http.post(f"/v1/streams/{name}/predict", **arguments).status_code == 200
        mine = {"Authorization": "Bearer the-secret-of-site-a", "X-Request-ID": "my-own"}
        response = http.get("/v1/streams", headers=mine)
        assert response.headers["x-request-id"] == "my-own"
        assert [s["stream"] for s in response.json()["streams"]] == ["a-1"]
        missing = http.get("/v1/streams/b-1", headers=mine)
        assert missing.status_code == 404
        assert missing.json()["error"]["request_id"] == "my-own"
        assert http.get("/metrics", headers=mine).status_code == 404


def test_each_folder_has_one_writer_and_one_number_of_replicas(tmp_path: Path) -> None:
    one = open_replica(tmp_path, 0)
    with pytest.raises(SettingError, match="in use by another server"):
        open_replica(tmp_path, 0)
    one.close()
    check_replicas(tmp_path, 2)
    for count in (1, 3, 12):
        with pytest.raises(SettingError, match="replica-0-of-2"):
            check_replicas(tmp_path, count)
    alone = dataclasses.replace(one.settings, state=tmp_path)
    with pytest.raises(SettingError, match="--engine ray"):
        Server(adaptive, square(32), SHAPE, alone)
    with live(tmp_path / "alone"), pytest.raises(SettingError, match="streams was written"):
        check_replicas(tmp_path / "alone", 2)


def test_a_cancelled_request_is_dropped_by_its_replica(tmp_path: Path) -> None:
    server = open_replica(tmp_path, 0)
    go = threading.Event()
    model = server.models[0].model
    predict = model.predict
    model.predict = lambda images: predict(images) if go.wait(30) else None
    request = raw(batch(1))
    headers = [(name.lower().encode(), value.encode()) for name, value in request["headers"].items()]
    headers.append((b"host", b"127.0.0.1"))

    async def leave() -> None:
        app = make_app(server)
        running = []
        # One after the other: the two are decoded at the same time, so either could be the first.
        for count, name in enumerate(("a", "b"), 1):
            path = f"/v1/streams/{name}/predict"
            scope = {"type": "http", "method": "POST", "path": path, "query_string": b"", "headers": headers}
            running.append(asyncio.create_task(call_app(app, scope, replay(request["content"]))))
            while server.admitted() < count or not server.find("a").running:
                await asyncio.sleep(0.01)
        running[1].cancel()
        await asyncio.gather(running[1], return_exceptions=True)
        go.set()
        assert (await running[0]).status_code == 200

    asyncio.run(leave())
    server.close()
    assert [stream.id for stream in server.streams()] == ["a"]


def test_a_step_that_hangs_delays_no_stop_of_a_replica_and_costs_no_other_stream(tmp_path: Path) -> None:
    """It hangs over a batch of seven images. Ray would wait for its request, and save nothing before that."""
    go, settings = threading.Event(), ServeSettings(state=tmp_path, live_models=2, workers=2, stop_seconds=4.0)

    def hang(layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        if isinstance(layer, nn.Conv2d) and len(inputs[0]) == 7:
            go.wait(60)

    async def stop() -> None:
        replica = Replica(lambda _: Server(adaptive, square(32), SHAPE, settings), 0)
        for number in range(2):
            assert (await replica.answer(*predict_request("cam-0", number))).status_code == 200
        stuck = asyncio.ensure_future(replica.answer(*predict_request("cam-1", 2, images=7)))
        await asyncio.sleep(0.5)
        start = time.monotonic()
        await replica.stop()
        await asyncio.wait({stuck}, timeout=5)
        assert stuck.done()
        assert stuck.result().status_code == 503
        assert time.monotonic() - start < 8  # a busy machine may add some

    hook = nn.modules.module.register_module_forward_pre_hook(hang)
    try:
        asyncio.run(stop())
    finally:
        go.set()
        hook.remove()
    with live(tmp_path) as server:
        model = adaptive()
        for number in range(2):
            model(batch(number))
        assert_same_state(server.state("cam-0"), model.state_dict())


def predict_request(stream: str, number: int, images: int = 4) -> tuple[Scope, bytes]:
    arguments = raw(batch(number, images))
    headers = [(name.lower().encode(), value.encode()) for name, value in arguments["headers"].items()]
    path, query = f"/v1/streams/{stream}/predict", b"adapt=wait"
    scope = {"type": "http", "method": "POST", "path": path, "query_string": query, "http_version": "1.1"}
    return {**scope, "scheme": "http", "headers": [*headers, (b"host", b"localhost")]}, arguments["content"]
