"""Exhaustion, and one tenant against another: idle and slow clients, long headers, costly images and JSON, the disk."""

import asyncio
import io
import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import numpy as np
import pytest
import torch
from exhaustion import answer, connect, head, message, rle_bmp, slow_json, tiff_with_large_tile
from live import SHAPE, Live, batch, live, raw, wait_for
from PIL import Image

from dpl.core.errors import DataError
from dpl.data import square
from dpl.data.images import decode
from dpl.serve.decoding import Body, DecoderPool, RequestDecoder
from dpl.serve.middleware import Tokens
from dpl.serve.monitoring import CURRENT
from dpl.serve.settings import ServeSettings

ONE, OTHER = "the-token-of-tenant-one", "the-token-of-the-other"
TENANTS = Tokens([(ONE, "one-"), (OTHER, "other-")])
MEGABYTE = 2**20


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def photo(kind: str = "PNG") -> bytes:
    out = io.BytesIO()
    Image.fromarray(np.zeros((30, 40, 3), np.uint8)).save(out, kind)
    return out.getvalue()


@pytest.fixture
def two_tenants(tmp_path: Path) -> Iterator[Live]:
    limits = {"queue": 6, "requests_per_token": 4, "header_timeout": 2.0, "decode_seconds": 0.3}
    with live(tmp_path, token=OTHER, tokens=TENANTS, **limits) as server:
        yield server


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


# Connections and headers: no token needed.


def test_idle_connections_are_closed_and_shut_nobody_out(tmp_path: Path) -> None:
    with ExitStack() as stack:
        server = stack.enter_context(live(tmp_path, connections=24, connections_per_address=16, header_timeout=1.5))
        idle = [stack.enter_context(connect(server.port)) for _ in range(60)]
        idle += [stack.enter_context(connect(server.port, f"127.0.0.{i}")) for i in range(2, 30)]
        with httpx.Client(base_url=server.http.base_url) as newcomer:
            assert newcomer.get("/healthz").status_code == 200
            assert newcomer.post("/v1/streams/cam/predict", **raw(batch(1))).status_code == 200
        start = time.monotonic()
        assert {answer(line)[0] for line in idle} == {0}
        assert time.monotonic() - start < 10


def test_a_header_has_a_time_limit_as_a_whole(tmp_path: Path) -> None:
    """One byte now and then keeps nothing open."""
    with live(tmp_path, header_timeout=0.5) as server, connect(server.port) as line:
        line.sendall(b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\nX-A: ")
        end = time.monotonic() + 5
        with pytest.raises(ConnectionError):  # noqa: PT012
            while time.monotonic() < end:
                line.sendall(b"a")
                time.sleep(0.05)


def test_long_headers_get_431_and_take_no_memory(tmp_path: Path) -> None:
    with live(tmp_path) as server:
        assert server.http.get("/healthz").status_code == 200
        before = resident()
        with connect(server.port) as line:
            line.sendall(b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\n")
            sent = 0
            try:
                for _ in range(200):
                    line.sendall(b"a:b\r\n" * 20_000)
                    sent += 100_000
            except ConnectionError:
                pass
        assert sent < 10 * MEGABYTE
        assert resident() - before < 20 * MEGABYTE
        fields = "\r\n".join(f"X-{i}: 1" for i in range(150))
        for lines in (f"X-Long: {'a' * 20_000}", fields):
            with connect(server.port) as line:
                line.sendall(f"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\n{lines}\r\n\r\n".encode())
                status, body = answer(line)
                assert status == 431
                assert "too long" in message(body)
        assert server.http.get("/healthz").status_code == 200


def test_where_all_connections_are_busy_health_still_answers(tmp_path: Path) -> None:
    with ExitStack() as stack:
        server = stack.enter_context(live(tmp_path, connections=8, connections_per_address=64, requests_per_token=64))
        server.http.close()
        for i in range(8):
            line = stack.enter_context(connect(server.port))
            line.sendall(head(f"/v1/streams/slow-{i}/predict", 1000, {"Content-Type": "image/png"}) + b"x")
        time.sleep(0.3)
        with httpx.Client(base_url=server.http.base_url) as newcomer:
            for path in ("/healthz", "/readyz", "/v2/health/live"):
                assert newcomer.get(path).status_code == 200
            refused = newcomer.get("/v1/streams")
            assert refused.status_code == 503
            assert "connections" in refused.json()["error"]["message"]


def test_a_client_that_does_not_read_makes_room(tmp_path: Path) -> None:
    """Its responses fill the buffers; it counts as waiting, so that a newcomer takes its place."""
    with ExitStack() as stack:
        server = stack.enter_context(live(tmp_path, connections_per_address=4))
        server.http.close()
        for _ in range(4):
            line = stack.enter_context(connect(server.port))
            line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            line.settimeout(0.5)
            with pytest.raises(TimeoutError):  # noqa: PT012
                while True:
                    line.sendall(head("/openapi.json", 0, method="GET"))
        with httpx.Client(base_url=server.http.base_url) as newcomer:
            assert newcomer.get("/v1/streams").status_code == 200


# Images and JSON.


def test_a_tile_larger_than_the_image_is_refused() -> None:
    tile = tiff_with_large_tile(6_000)
    with pytest.raises(DataError, match="6000 x 6000"):
        decode(tile)
    with pytest.raises(DataError, match="expected one of JPEG, PNG"):
        decode(tile, untrusted=True)


def test_costly_formats_are_refused_from_strangers_alone() -> None:
    bmp = rle_bmp(64, data=bytes([64, 0, 0, 0]) * 64 + bytes([0, 1]))  # with every pixel, for old Pillow
    assert decode(bmp).size == (64, 64)
    with pytest.raises(DataError, match="run-length"):
        decode(bmp, untrusted=True)
    for kind in ("JPEG", "PNG", "BMP", "GIF", "WEBP"):
        assert decode(photo(kind), untrusted=True).size == (40, 30)


def costly_image() -> bytes:
    """A PNG of 24 megapixels: half a second of real work for few bytes."""
    out = io.BytesIO()
    Image.new("RGB", (6000, 4000)).save(out, "PNG", compress_level=1)
    return out.getvalue()


def test_decoding_has_a_time_limit_and_other_tenants_do_not_wait(two_tenants: Live) -> None:
    images, statuses = [("images", ("a.png", costly_image()))] * 6, []
    other = two_tenants.http.post("/v1/streams/other-1/predict", files=[("images", ("a", photo()))])
    assert other.status_code == 200  # the processes have started

    def attack() -> None:
        with httpx.Client(base_url=two_tenants.http.base_url, headers=bearer(ONE), timeout=60) as http:
            answer = http.post("/v1/streams/one-1/predict", files=images)
            statuses.append((answer.status_code, answer.json()["error"]["message"]))

    threads = [threading.Thread(target=attack) for _ in range(2)]
    for thread in threads:
        thread.start()
    waits, begin = [], time.monotonic()
    while any(thread.is_alive() for thread in threads):
        start = time.monotonic()
        other = two_tenants.http.post("/v1/streams/other-1/predict", files=[("images", ("a", photo()))])
        assert other.status_code == 200
        waits.append(time.monotonic() - start)
    assert {status for status, _ in statuses} <= {422, 503}
    assert any("decode_seconds" in reason for _, reason in statuses)
    assert max(waits) < (time.monotonic() - begin) / 2, max(waits)


def test_decoding_stops_when_its_client_leaves(tmp_path: Path) -> None:
    with live(tmp_path, decoders=1) as server:
        server.http.post("/v1/streams/cam/predict", files=[("images", ("a", photo()))]).raise_for_status()
        request = server.http.build_request(
            "POST", "/v1/streams/cam/predict", files=[("images", ("a", costly_image()))] * 60
        )
        body = request.read()
        with connect(server.port) as line:
            line.sendall(head("/v1/streams/cam/predict", len(body), {"Content-Type": request.headers["content-type"]}))
            line.sendall(body)
            time.sleep(0.3)
        start = time.monotonic()
        server.http.post("/v1/streams/cam/predict", files=[("images", ("a", photo()))]).raise_for_status()
        assert time.monotonic() - start < 6  # 60 such images take more than 20 s


def test_memory_of_decoding_is_limited(tmp_path: Path) -> None:
    with live(tmp_path, decode_memory=48 * MEGABYTE) as server:
        answer = server.http.post("/v1/streams/cam/predict", files=[("images", ("a", costly_image()))])
        assert answer.status_code == 422
        assert "memory" in answer.json()["error"]["message"] or "Memory" in answer.json()["error"]["message"]
        assert server.http.post("/v1/streams/cam/predict", files=[("images", ("a", photo()))]).status_code == 200


def test_json_is_bounded_before_it_is_parsed(tmp_path: Path) -> None:
    with live(tmp_path) as server:
        before, start = resident(), time.monotonic()
        for body in (slow_json(30 * MEGABYTE), b'{"images": ["' + b'","' * (10 * MEGABYTE) + b'"]}'):
            answer = server.http.post(
                "/v1/streams/cam/predict", content=body, headers={"Content-Type": "application/json"}
            )
            assert answer.status_code == 422
            assert "too many" in answer.json()["error"]["message"]
        for path in ("rollback", "reset", "snapshot"):
            answer = server.http.post(f"/v1/streams/cam/{path}", content=slow_json(MEGABYTE))
            assert answer.status_code == 413
        assert time.monotonic() - start < 15  # most of it starts the process that decodes
        assert resident() - before < 250 * MEGABYTE  # of which this test itself holds 60


# Tenants.


def test_slow_uploads_take_no_place_in_the_queue(two_tenants: Live) -> None:
    with ExitStack() as stack:
        slow = []
        for i in range(8):
            line = stack.enter_context(connect(two_tenants.port))
            headers = {"Content-Type": "image/png", **bearer(ONE)}
            line.sendall(head(f"/v1/streams/one-{i}/predict", 1000, headers) + b"x")
            slow.append(line)
        time.sleep(0.2)
        assert two_tenants.server.admitted() == 0
        for number in range(4):
            assert two_tenants.predict("other-1", number).status_code == 200
        statuses = [answer(line)[0] for line in slow]
        assert sorted(statuses) == [408] * 4 + [429] * 4  # too slow, and too many at once
    assert len(two_tenants.server.streams()) == 1


def test_a_body_must_keep_a_rate(tmp_path: Path) -> None:
    with live(tmp_path, header_timeout=0.3, min_rate=1000) as server, connect(server.port) as line:
        line.sendall(head("/v1/streams/cam/predict", 10_000, {"Content-Type": "image/png"}))
        start = time.monotonic()
        with pytest.raises((ConnectionError, TimeoutError)):  # noqa: PT012
            line.settimeout(0.05)
            while time.monotonic() - start < 10:
                line.sendall(b"x" * 5)
                try:
                    assert b" 408 " in line.recv(4096)
                    raise ConnectionError
                except TimeoutError:
                    continue
        assert time.monotonic() - start < 8


def test_bytes_of_one_tenant_are_bounded(tmp_path: Path) -> None:
    limits = {"uploads_per_token": MEGABYTE, "requests_per_token": 16}
    with live(tmp_path, token=OTHER, tokens=TENANTS, **limits) as server, ExitStack() as stack:
        lines = []
        for i in range(4):
            line = stack.enter_context(connect(server.port))
            headers = {"Content-Type": "image/png", **bearer(ONE)}
            line.sendall(head(f"/v1/streams/one-{i}/predict", MEGABYTE, headers) + bytes(400_000))
            lines.append(line)
            time.sleep(0.2)
        statuses = []
        for line in lines[2:]:
            line.shutdown(socket.SHUT_WR)
            statuses.append(answer(line)[0])
        assert statuses == [429] * 2
        assert server.predict("other-1", 1).status_code == 200


def test_a_body_refused_with_its_last_part_gets_an_answer(tmp_path: Path) -> None:
    """Nothing of it is left to be read."""
    with live(tmp_path, token=ONE, tokens=TENANTS, uploads_per_token=1000) as server:
        for _ in range(3):
            refused = server.http.post("/v1/streams/one-1/predict", content=bytes(2000))
            assert refused.status_code == 429
            assert "uploads_per_token" in refused.json()["error"]["message"]
        assert server.http.get("/v1/streams").status_code == 200


def hold(server: Live) -> tuple[threading.Event, threading.Event, list[str | None]]:
    """Let every prediction wait until told; the list has the streams in the order of their turns."""
    inside, go, order = threading.Event(), threading.Event(), []
    for live_model in server.server.models:
        predict = live_model.model.predict

        def held(images, predict=predict):
            inside.set()
            order.append(CURRENT.get())
            assert go.wait(60)
            return predict(images)

        live_model.model.predict = held
    return inside, go, order


def test_one_tenant_cannot_use_the_last_place_and_turns_alternate(tmp_path: Path) -> None:
    """Six requests of one tenant for a queue of four; those of the other are accepted, and come second in turn."""
    done: list[str] = []
    limits = {"queue": 4, "requests_per_token": 16, "queue_per_stream": 8}
    with live(tmp_path, token=OTHER, tokens=TENANTS, **limits) as server:
        inside, go, order = hold(server)

        def ask(token: str, stream: str) -> None:
            arguments = raw(batch(1))
            arguments["headers"] |= bearer(token)
            status = httpx.post(
                f"{server.http.base_url}/v1/streams/{stream}/predict?adapt=off", timeout=60, **arguments
            ).status_code
            done.append(f"{stream} {status}")

        threads = [threading.Thread(target=ask, args=(ONE, f"one-{i}")) for i in range(6)]
        threads[0].start()
        assert inside.wait(30)
        for thread in threads[1:]:
            thread.start()
        wait_for(lambda: len(done) == 3)
        assert sorted(entry.split()[1] for entry in done) == ["503"] * 3  # three accepted, one place is kept
        threads.append(threading.Thread(target=ask, args=(OTHER, "other-1")))
        threads[-1].start()
        wait_for(lambda: server.server.admitted() == 4)
        go.set()
        for thread in threads:
            thread.join()
    assert sum(entry.endswith("200") for entry in done) == 4
    assert order[1] == "other-1"


def test_streams_and_bytes_of_one_tenant_are_bounded(tmp_path: Path) -> None:
    with live(tmp_path / "a", token=ONE, tokens=TENANTS, streams_per_token=2) as server:
        assert [server.predict(f"one-{i}", 1).status_code for i in range(3)] == [200, 200, 429]
        server.http.headers.update(bearer(OTHER))
        assert server.predict("other-1", 1).status_code == 200
    with live(tmp_path / "b", token=ONE, tokens=TENANTS, disk_per_token=1) as server:
        assert server.predict("one-1", 1, adapt="wait").status_code == 200
        server.good("POST", "/v1/streams/one-1/snapshot")
        refused = server.predict("one-2", 1)
        assert refused.status_code == 429
        assert "disk_per_token" in refused.json()["error"]["message"]
        assert server.predict("one-1", 2).status_code == 200
    with live(tmp_path / "b", token=ONE, tokens=TENANTS, disk_per_token=1) as server:
        assert server.predict("one-2", 1).status_code == 429  # counted after a restart, too
        server.good("DELETE", "/v1/streams/one-1")
        assert server.predict("one-2", 1).status_code == 200


# A slow disk.


@pytest.fixture
def slow_disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Every fsync waits for the event."""
    fast, sync = threading.Event(), os.fsync

    def slow(handle: int) -> None:
        fast.wait(60)
        sync(handle)

    fast.set()
    monkeypatch.setattr(os, "fsync", slow)
    yield fast
    fast.set()


def test_a_slow_disk_stops_no_prediction_and_health_says_so(tmp_path: Path, slow_disk: threading.Event) -> None:
    limits = {"live_models": 1, "max_streams_in_memory": 2, "snapshot_every": 1, "slow_disk": 0.5, "timeout": 1.0}
    with live(tmp_path, **limits) as server:
        for stream in ("a", "b"):
            server.predict(stream, 0, adapt="wait")
        server.wait_until_written()
        slow_disk.clear()
        reset = threading.Thread(target=lambda: server.http.post("/v1/streams/a/reset"))
        snapshot = threading.Thread(target=lambda: server.http.post("/v1/streams/b/snapshot"))
        reset.start()
        snapshot.start()
        waits = []
        for number in range(10):
            start = time.monotonic()
            assert server.predict("ab"[number % 2], number).status_code == 200
            waits.append(time.monotonic() - start)
        assert max(waits) < 1.0, waits
        wait_for(lambda: server.good("GET", "/healthz")["status"] == "degraded")
        assert "slow" in server.good("GET", "/healthz")["problems"][0]
        refused = server.predict("new", 1)  # memory is full, and no stream can be moved to the disk
        assert refused.status_code in (200, 503)
        reset.join()
        snapshot.join()
        late = server.http.post("/v1/streams/b/snapshot")
        assert late.status_code == 503
        assert server.good("POST", "/v1/streams/a/reset")["durable"] is False
        assert server.http.delete("/v1/streams/b").status_code == 503  # it follows
        slow_disk.set()
        wait_for(lambda: server.good("GET", "/healthz")["status"] == "ok")
        wait_for(lambda: "b" not in {s["stream"] for s in server.good("GET", "/v1/streams")["streams"]})
        assert server.good("POST", "/v1/streams/a/snapshot")["durable"] is True


def test_a_stop_keeps_its_time_on_a_slow_disk(tmp_path: Path, slow_disk: threading.Event) -> None:
    with live(tmp_path, snapshot_every=1, stop_seconds=1.0) as server:
        server.predict("a", 0, adapt="wait")
        server.wait_until_written()
        slow_disk.clear()
        server.predict("a", 1, adapt="wait")
        start = time.monotonic()
        server.server.close()
        assert time.monotonic() - start < 3


def test_health_names_no_folder(tmp_path: Path) -> None:
    with live(tmp_path / "secret-place", snapshot_every=1) as server:
        (tmp_path / "secret-place" / "streams" / "cam").write_text("in the way")
        server.predict("cam", 0, adapt="wait")
        wait_for(lambda: server.good("GET", "/healthz")["status"] == "degraded")
        assert "secret-place" not in json.dumps(server.good("GET", "/healthz"))


def test_a_client_that_leaves_when_its_images_are_decoded_harms_no_other() -> None:
    """The event loop is late: the process is done with one body, and the next gets it before the client is noticed."""
    settings = ServeSettings(state=Path(), decoders=1)
    decoders = DecoderPool(RequestDecoder(square(32), SHAPE, 8, 2**20), settings)
    body = Body("application/json", json.dumps({"arrays": batch(1).tolist()}).encode())

    async def leave() -> None:
        await decoders.decode("a", body)
        first, second = (asyncio.ensure_future(decoders.decode(tenant, body)) for tenant in "ab")
        await asyncio.sleep(0)  # the first has the process, the second waits for it
        time.sleep(1)
        first.cancel()
        images, _ = await second
        assert torch.equal(images, batch(1))
        assert first.cancelled()

    try:
        asyncio.run(leave())
    finally:
        decoders.close()
