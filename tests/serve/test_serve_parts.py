"""A divided server without Ray: the same answers, each stream with one part, every part its own streams alone."""

import asyncio
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from hostile import MEGABYTE, attacks, refused
from live import NAMES, SHAPE, adaptive, assert_same_state, batch, live, raw, state_on_disk, wait_for

from dpl.core.errors import SettingError
from dpl.data import square
from dpl.serve.app import make_app
from dpl.serve.cluster.front import make_front
from dpl.serve.cluster.relay import Ask, Reply, answered
from dpl.serve.engine import Overloaded
from dpl.serve.gate import GateRules
from dpl.serve.metrics import Metrics
from dpl.serve.security import Tokens
from dpl.serve.server import Server, open_server
from dpl.serve.settings import ServeSettings
from dpl.serve.shard import Shard, owner

STREAMS = ("cam-0", "cam-1", "cam-2", "cam-3")
SECRET = "a-long-enough-secret"


def open_part(folder: Path, index: int, count: int = 2, tokens: Tokens | None = None) -> Server:
    settings = ServeSettings(state=folder, live_models=1, latency_budget=60.0, max_body=4 * MEGABYTE)
    shard = Shard(index, count)
    return open_server(adaptive, square(32), SHAPE, settings, names=NAMES, tokens=tokens, shard=shard)


@contextmanager
def divided(folder: Path, tokens: Tokens | None = None) -> Iterator[tuple[httpx.Client, list[Server], set[int]]]:
    """Two parts in this process behind a front on a real socket; parts in the set are away."""
    away: set[int] = set()
    with ExitStack() as stack:
        parts = []
        for index in range(2):
            parts.append(open_part(folder, index, tokens=tokens))
            stack.callback(parts[-1].close)
        apps = [make_app(part) for part in parts]

        def link(index: int) -> Any:
            async def ask_part(ask: Ask) -> Reply:
                if index in away:
                    raise Overloaded(503, "away", 2)
                return await answered(apps[index], ask)

            return ask_part

        front = make_front([link(0), link(1)], GateRules(4 * MEGABYTE, tokens, Metrics()), timeout=30)
        place = socket.create_server(("127.0.0.1", 0))
        runner = uvicorn.Server(uvicorn.Config(front, log_level="error", lifespan="off"))
        thread = threading.Thread(target=runner.run, kwargs={"sockets": [place]})
        thread.start()
        wait_for(lambda: runner.started)
        url = f"http://127.0.0.1:{place.getsockname()[1]}"
        headers = {"Authorization": f"Bearer {SECRET}"} if tokens else {}
        with httpx.Client(base_url=url, timeout=30, headers=headers) as http:
            yield http, parts, away
        runner.should_exit = True
        thread.join()


def test_owners_are_stable_even_and_move_little() -> None:
    names = [f"camera-{i}" for i in range(3000)]
    assert [owner(name, 5) for name in ("a", "b", "c", "camera-7")] == [0, 2, 1, 0]  # in every process, for ever
    counts = [sum(owner(name, 3) == part for name in names) for part in range(3)]
    assert all(850 < count < 1150 for count in counts), counts
    moved = [(owner(name, 3), owner(name, 4)) for name in names if owner(name, 3) != owner(name, 4)]
    assert all(new == 3 for _, new in moved)
    assert 600 < len(moved) < 900
    with pytest.raises(SettingError, match="part 2 of 2"):
        Shard(2, 2)


def test_same_answers_as_one_server_and_each_stream_at_its_owner(tmp_path: Path) -> None:
    with divided(tmp_path / "two") as (http, parts, _), live(tmp_path / "one") as single:
        for number in range(4):
            for stream in STREAMS:
                query = {"adapt": "wait", "probabilities": "true"}
                one = single.predict(stream, number, **query).json()
                two = http.post(f"/v1/streams/{stream}/predict", params=query, **raw(batch(number))).json()
                assert two["predictions"] == one["predictions"]
                assert (two["seq"], two["stream"]) == (one["seq"], stream)
        for stream in STREAMS:
            http.post(f"/v1/streams/{stream}/snapshot").raise_for_status()
            mine = parts[owner(stream, 2)]
            assert_same_state(state_on_disk(mine, stream), single.state(stream))
        held = [{stream.id for stream in part.engine.streams()} for part in parts]
        assert held[0] | held[1] == set(STREAMS)
        assert not held[0] & held[1]
        assert all(held)


def test_what_concerns_all_parts_is_put_together(tmp_path: Path) -> None:
    with divided(tmp_path) as (http, _, away):
        for stream in STREAMS:
            http.post(f"/v1/streams/{stream}/predict", **raw(batch(1))).raise_for_status()
        listed = http.get("/v1/streams").json()
        assert [s["stream"] for s in listed["streams"]] == list(reversed(STREAMS))
        assert listed["total"] == 4
        assert len(http.get("/v1/streams?limit=3").json()["streams"]) == 3
        assert http.get("/v1/streams?limit=x").status_code == 422
        about = http.get("/v1/server").json()
        assert about["method"] == "tent"
        assert len(about["replicas"]) == 2
        text = http.get("/metrics").text
        assert 'dpl_images_total{replica="0"}' in text
        assert 'dpl_images_total{replica="1"}' in text
        assert text.count("# TYPE dpl_images_total counter") == 1
        assert http.get("/healthz").json() == {"status": "ok", "problems": []}
        assert http.get("/readyz").status_code == 200
        assert "dpl serve" in http.get("/").text
        assert http.get("/openapi.json").json()["paths"]
        assert http.get("/nothing").status_code == 404

        away.add(0)
        gone = next(s for s in STREAMS if owner(s, 2) == 0)
        here = next(s for s in STREAMS if owner(s, 2) == 1)
        answer = http.post(f"/v1/streams/{gone}/predict", **raw(batch(2)))
        assert answer.status_code == 503
        assert answer.headers["retry-after"] == "2"
        assert http.post(f"/v1/streams/{here}/predict", **raw(batch(2))).status_code == 200
        assert http.get("/healthz").json()["problems"] == ["replica 0: does not answer; its streams wait"]
        assert http.get("/readyz").status_code == 503
        assert http.get("/v1/streams").json()["incomplete"] is True
        assert http.get("/docs").status_code == 200
        away.add(1)
        assert http.get("/v1/streams").status_code == 503
        assert http.get("/").status_code == 503


def test_the_front_refuses_what_one_server_refuses(tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    with divided(tmp_path / "state") as (http, parts, _):
        http.post("/v1/streams/known/predict", **raw(batch(1))).raise_for_status()
        for attack in list(attacks(trace))[::3]:  # the parts refuse the same; here it is the way to them
            refused(str(http.base_url), attack)
        assert sum(len(part.engine.streams()) for part in parts) == 1
    assert not trace.exists()


def test_tokens_hold_at_the_front_and_prefixes_in_the_parts(tmp_path: Path) -> None:
    tokens = Tokens([(SECRET, ""), ("the-secret-of-site-a", "a-")])
    with divided(tmp_path, tokens) as (http, _, _):
        assert http.get("/v1/streams", headers={"Authorization": ""}).status_code == 401
        for name in ("a-1", "b-1"):
            arguments = raw(batch(1))
            assert http.post(f"/v1/streams/{name}/predict", **arguments).status_code == 200
        mine = {"Authorization": "Bearer the-secret-of-site-a", "X-Request-ID": "my-own"}
        answer = http.get("/v1/streams", headers=mine)
        assert answer.headers["x-request-id"] == "my-own"
        assert [s["stream"] for s in answer.json()["streams"]] == ["a-1"]
        assert http.get("/v1/streams/b-1", headers=mine).status_code == 404
        assert http.get("/metrics", headers=mine).status_code == 404


def test_one_writer_for_each_stream_and_any_number_of_parts(tmp_path: Path) -> None:
    """Made by one server, taken over by two parts, then by three, then by one again; never by two at once."""
    with live(tmp_path) as single:
        for stream in STREAMS:
            single.predict(stream, 1, adapt="wait")
    expected = adaptive()
    expected(batch(1))
    for count in (2, 3):
        parts = [open_part(tmp_path, index, count) for index in range(count)]
        known = [{stream.id for stream in part.engine.streams()} for part in parts]
        assert set.union(*known) == set(STREAMS)
        assert sum(map(len, known)) == len(STREAMS)
        with pytest.raises(SettingError, match="in use by another server"):
            open_part(tmp_path, 0, count)
        with pytest.raises(SettingError, match="in use by another server"):
            open_part(tmp_path, 0, 1)
        for part in parts:
            part.close()
    with live(tmp_path) as single:
        with pytest.raises(SettingError, match="in use by another server"):
            open_part(tmp_path, 0, 2)
        for stream in STREAMS:
            assert_same_state(single.state(stream), expected.state_dict())


def test_a_part_cleans_up_after_itself_alone(tmp_path: Path) -> None:
    """What a crash left of another part's stream may be something that part is just writing."""
    open_part(tmp_path, 0).close()
    leftovers = [tmp_path / "streams" / stream / ".x.tmp" for stream in STREAMS]
    for leftover in leftovers:
        leftover.mkdir(parents=True)
    open_part(tmp_path, 1).close()
    assert [leftover.exists() for leftover in leftovers] == [owner(stream, 2) == 0 for stream in STREAMS]


def test_a_request_that_is_given_up_is_dropped_from_its_part(tmp_path: Path) -> None:
    part = open_part(tmp_path, 0, 1)
    go = threading.Event()
    slot = part.engine._residence._slots[0]
    predict = slot.model.predict
    slot.model.predict = lambda images: predict(images) if go.wait(30) else None
    request = raw(batch(1))
    headers = tuple((name.lower().encode(), value.encode()) for name, value in request["headers"].items())
    headers += ((b"host", b"127.0.0.1"),)

    async def leave() -> None:
        app = make_app(part)
        asks = [Ask("POST", f"/v1/streams/{name}/predict", b"", headers, request["content"]) for name in ("a", "b")]
        running = [asyncio.create_task(answered(app, ask)) for ask in asks]
        while part.engine._admitted < 2 or not part.engine.find("a").running:
            await asyncio.sleep(0.01)
        running[1].cancel()
        await asyncio.gather(running[1], return_exceptions=True)
        go.set()
        assert (await running[0]).status == 200

    asyncio.run(leave())
    part.close()
    assert [stream.id for stream in part.engine.streams()] == ["a"]
