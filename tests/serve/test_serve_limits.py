"""Nothing grows without bound: bodies, pixels, batches, queues, streams; and each refusal says when to come back."""

import io
import socket
import threading
import time
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from hostile import MEGABYTE, png
from live import Live, batch, live, raw, wait_for
from PIL import Image


def resident() -> int:
    """Bytes of memory that this process, and so the server in it, really uses."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def saved(image: Image.Image, kind: str, **options: object) -> bytes:
    out = io.BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


def photo(size: tuple[int, int] = (48, 36)) -> Image.Image:
    pixels = np.random.default_rng(1).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def zipped() -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        archive.writestr("a.jpg", b"not an image")
    return out.getvalue()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory):
    with live(tmp_path_factory.mktemp("state"), max_body=4 * MEGABYTE) as running:
        yield running


def send(server: Live, data: bytes, name: str = "a.jpg") -> int:
    answer = server.http.post("/v1/streams/cam/predict?adapt=off", files=[("images", (name, data))])
    assert answer.json(), "every answer is JSON"
    return answer.status_code


def test_bombs_are_refused_from_the_header(server: Live) -> None:
    """169 megapixels in half a megabyte: refused without being decoded."""
    bombs = [png(13_000, 13_000, 13_000), png(9_000, 9_000, 9_000), png(60_000, 60_000, 1)]
    send(server, saved(photo(), "PNG"))
    before, peak = resident(), 0
    for bomb in bombs:
        assert len(bomb) < MEGABYTE
        assert send(server, bomb) in (413, 422)
        peak = max(peak, resident())
    assert peak - before < 50 * MEGABYTE
    assert send(server, saved(photo(), "PNG")) == 200


def test_damaged_and_disguised_files_are_refused(server: Live) -> None:
    jpeg = saved(photo(), "JPEG")
    damaged = {
        "truncated JPEG": jpeg[: len(jpeg) // 2],
        "zip": zipped(),
        "empty": b"",
        "text": b"<svg xmlns='http://www.w3.org/2000/svg'></svg>",
        "postscript": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\nshowpage\n",
        "floats": saved(Image.new("F", (8, 8)), "TIFF"),
    }
    for what, data in damaged.items():
        assert send(server, data) == 422, what
        assert send(server, jpeg) == 200, f"after {what}"
    assert send(server, png(4_000, 4_000, 3)) in (200, 422)  # data for 3 rows only: Pillow takes the rest as black


def test_unusual_images_are_understood(server: Live) -> None:
    image = photo()
    exif = Image.Exif()
    exif[0x0112] = 6
    grey16 = Image.fromarray((np.arange(48 * 36).reshape(36, 48) * 37 % 65536).astype(np.uint16))
    frames = [photo((20, 20)), photo((20, 20)).rotate(90)]
    usual = {
        "CMYK": saved(image.convert("CMYK"), "JPEG"),
        "16 bit": saved(grey16, "PNG"),
        "palette": saved(image.convert("P"), "PNG"),
        "alpha": saved(image.convert("RGBA"), "PNG"),
        "one bit": saved(image.convert("1"), "PNG"),
        "animated": saved(frames[0], "GIF", save_all=True, append_images=frames[1:]),
        "rotated": saved(image, "JPEG", exif=exif),
        "one pixel": saved(photo((1, 1)), "PNG"),
        "strip": saved(photo((2_000, 1)), "PNG"),
    }
    for what, data in usual.items():
        assert send(server, data) == 200, what


def test_a_rotated_photo_is_seen_upright(server: Live) -> None:
    image = photo((40, 40))
    exif = Image.Exif()
    exif[0x0112] = 6  # stored lying on its side
    lying = saved(image.transpose(Image.Transpose.ROTATE_90), "PNG", exif=exif)

    def probabilities(data: bytes) -> list[float]:
        answer = server.http.post(
            "/v1/streams/up/predict?adapt=off&probabilities=true", files=[("images", ("a.png", data))]
        )
        return answer.json()["predictions"][0]["probabilities"]

    assert probabilities(lying) == probabilities(saved(image, "PNG"))


def test_a_large_body_is_refused_by_its_length(server: Live) -> None:
    before = resident()
    chunk = bytes(MEGABYTE)
    headers = {"Content-Type": "image/png", "Content-Length": str(100 * MEGABYTE)}
    answer = server.http.post("/v1/streams/cam/predict", content=(chunk for _ in range(100)), headers=headers)
    assert answer.status_code == 413
    assert str(4 * MEGABYTE) in answer.json()["error"]["message"]
    del answer
    assert resident() - before < 60 * MEGABYTE  # the test itself holds one megabyte of the body
    assert server.predict("cam", 1).status_code == 200


def test_a_large_body_without_a_length_is_cut_off_while_it_comes(server: Live) -> None:
    sent = 0

    def endless():
        nonlocal sent
        for _ in range(64):
            sent += 1
            yield bytes(MEGABYTE // 4)

    before = resident()
    for kind in ("image/png", "application/json", "multipart/form-data; boundary=x"):
        answer = server.http.post("/v1/streams/cam/predict", content=endless(), headers={"Content-Type": kind})
        assert answer.status_code in ((400, 413) if "form" in kind else (413,)), answer.text
    assert resident() - before < 50 * MEGABYTE
    assert server.predict("cam", 1).status_code == 200


def test_a_body_that_never_ends_is_given_up(tmp_path: Path) -> None:
    with live(tmp_path, timeout=0.3) as server, socket.create_connection(("127.0.0.1", server.port)) as slow:
        slow.sendall(b"POST /v1/streams/cam/predict HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: image/png\r\n"
                     b"Content-Length: 1000\r\n\r\nabc")  # fmt: skip
        slow.settimeout(20)
        assert b" 408 " in slow.recv(4096)
        assert server.predict("cam", 1).status_code == 200


class Blocked:
    """Holds the one worker in a request of its own until released."""

    def __init__(self, server: Live) -> None:
        self.go, self.inside = threading.Event(), threading.Event()
        live_model = server.server.models[0]
        self.model, self.predict = live_model.model, live_model.model.predict

    def __enter__(self) -> "Blocked":
        def held(images: torch.Tensor) -> torch.Tensor:
            self.inside.set()
            assert self.go.wait(30)
            return self.predict(images)

        self.model.predict = held  # type: ignore[method-assign]
        return self

    def __exit__(self, *_: object) -> None:
        self.go.set()
        del self.model.predict


def in_threads(count: int, work) -> list[threading.Thread]:
    threads = [threading.Thread(target=work, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    return threads


def test_full_queues_answer_429_and_503_with_a_time_to_come_back(tmp_path: Path) -> None:
    answers: dict[str, int] = {}
    with live(tmp_path, queue=5, queue_per_stream=2, live_models=1) as server:
        with Blocked(server) as blocked:

            def ask(stream: str) -> None:
                answers[stream] = server.predict(stream.split("/")[0], 1).status_code

            first = in_threads(1, lambda _: ask("a/0"))
            assert blocked.inside.wait(10)
            rest = in_threads(4, lambda i: ask(["a/1", "b/0", "c/0", "d/0"][i]))
            wait_for(lambda: server.server.admitted() == 5)
            full = server.predict("e", 1)
            assert full.status_code == 503
            assert int(full.headers["retry-after"]) >= 1
            assert server.http.get("/healthz").status_code == 200  # still answers
            assert len(server.server.streams()) == 4
            blocked.go.set()
            for thread in [*first, *rest]:
                thread.join()
        assert set(answers.values()) == {200}
        assert server.predict("e", 1).status_code == 200
    with live(tmp_path / "per", queue=50, queue_per_stream=2, live_models=1) as server, Blocked(server) as blocked:
        threads = in_threads(2, lambda i: server.predict("a", i))
        wait_for(lambda: server.server.admitted() == 2)
        full = server.predict("a", 5)
        assert full.status_code == 429
        assert int(full.headers["retry-after"]) >= 1
        blocked.go.set()
        for thread in threads:
            thread.join()


def test_a_request_that_waits_too_long_is_given_up(tmp_path: Path) -> None:
    with live(tmp_path, live_models=1, timeout=0.5) as server, Blocked(server) as blocked:
        threads = in_threads(1, lambda _: server.predict("a", 1))
        assert blocked.inside.wait(10)
        late = server.predict("b", 2)
        assert late.status_code == 503
        assert "retry-after" in late.headers
        blocked.go.set()
        for thread in threads:
            thread.join()
        wait_for(lambda: server.server.admitted() == 0)
        assert server.http.get("/v1/streams/b").status_code == 404  # it was never begun


def test_a_client_that_leaves_takes_its_request_along(tmp_path: Path) -> None:
    with live(tmp_path, live_models=1) as server:
        with Blocked(server) as blocked:
            threads = in_threads(1, lambda _: server.predict("a", 1))
            assert blocked.inside.wait(10)
            body = batch(2).numpy().tobytes()
            with socket.create_connection(("127.0.0.1", server.port)) as leaver:
                leaver.sendall(
                    b"POST /v1/streams/gone/predict HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Shape: 4,3,32,32\r\n"
                    b"Content-Type: application/octet-stream\r\nContent-Length: %d\r\n\r\n" % len(body) + body
                )
                wait_for(lambda: server.server.admitted() == 2)
            wait_for(lambda: server.server.admitted() == 1)
            blocked.go.set()
            for thread in threads:
                thread.join()
        assert server.http.get("/v1/streams/gone").status_code == 404
        assert "dpl_cancelled_total 1.0" in server.http.get("/metrics").text


def test_adaptation_is_skipped_under_load_and_said_so(tmp_path: Path) -> None:
    with live(tmp_path, live_models=1, latency_budget=0.05) as server:
        server.predict("a", 0, adapt="wait")
        answers: list[dict] = []
        with Blocked(server) as blocked:
            first = in_threads(1, lambda _: answers.append(server.predict("a", 1).json()))
            assert blocked.inside.wait(10)
            rest = in_threads(3, lambda i: answers.append(server.predict("b", i).json()))
            wait_for(lambda: server.server.admitted() == 4)
            time.sleep(0.1)
            blocked.go.set()
            for thread in [*first, *rest]:
                thread.join()
        kinds = [answer["adaptation"]["status"] for answer in answers]
        assert kinds.count("skipped") >= 2
        assert "scheduled" in kinds  # the last in the queue; its answer need not be the last to be noted down here
        reason = next(a["adaptation"]["reason"] for a in answers if a["adaptation"]["status"] == "skipped")
        assert "latency budget" in reason
        skipped = sum(server.settled(stream)["skipped_batches"] for stream in ("a", "b"))
        assert skipped == kinds.count("skipped")
        assert f'dpl_adaptations_total{{result="skipped"}} {float(skipped)}' in server.http.get("/metrics").text
        waits = server.predict("b", 9, adapt="wait").json()
        assert waits["adaptation"]["status"] == "done"


def test_the_number_of_streams_is_bounded(tmp_path: Path) -> None:
    with live(tmp_path, max_streams=2) as server:
        assert [server.predict(name, 1).status_code for name in ("a", "b", "c")] == [200, 200, 429]
        server.good("DELETE", "/v1/streams/a")
        assert server.predict("c", 1).status_code == 200


def test_many_images_in_one_request_are_refused(server: Live) -> None:
    answer = server.http.post("/v1/streams/cam/predict", **raw(batch(0, images=65)))
    assert answer.status_code == 422
    assert "1 to 64" in answer.json()["error"]["message"]
