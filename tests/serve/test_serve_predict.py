"""What can be sent, and what comes back."""

import base64
import io
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from live import NAMES, Live, adaptive, batch, live, raw
from PIL import Image

from dpl.data import square
from dpl.serve.schemas import SafeJSON


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory):
    with live(tmp_path_factory.mktemp("state"), max_batch=8) as running:
        yield running


def picture(seed: int = 0, size: tuple[int, int] = (40, 30), kind: str = "PNG") -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, kind)
    return out.getvalue()


def tensor(data: bytes) -> torch.Tensor:
    return square(32)(Image.open(io.BytesIO(data)).convert("RGB"))


def test_every_way_of_sending_the_same_images_gives_the_same_answer(server: Live) -> None:
    files = [picture(seed) for seed in range(3)]
    images = torch.stack([tensor(data) for data in files])
    wanted = adaptive().predict(images).softmax(1)
    ways = {
        "files": {"files": [("images", (f"{i}.png", data)) for i, data in enumerate(files)]},
        "base64": {"json": {"images": [base64.b64encode(data).decode() for data in files]}},
        "lists": {"json": {"arrays": images.tolist()}},
        "raw": raw(images),
    }
    for way, arguments in ways.items():
        answer = server.good(
            "POST", f"/v1/streams/{way}/predict", params={"adapt": "off", "probabilities": True}, **arguments
        )
        got = torch.tensor([row["probabilities"] for row in answer["predictions"]])
        assert torch.equal(got, wanted), way
    one = server.good("POST", "/v1/streams/one/predict", content=files[0], headers={"Content-Type": "image/png"})
    assert len(one["predictions"]) == 1


def test_an_answer_says_what_it_is(server: Live) -> None:
    answer = server.http.post(
        "/v1/streams/said/predict?top=3",
        **{**raw(batch(1)), "headers": {**raw(batch(1))["headers"], "X-Request-ID": "me-1"}},
    )
    body = answer.json()
    assert answer.headers["x-request-id"] == body["request_id"] == "me-1"
    assert {"stream", "seq", "run", "durable_through", "snapshot_every", "adaptation", "guard"} <= set(body)
    assert body["durable_through"] < body["seq"]  # the adaptation it has scheduled is not on disk
    row = body["predictions"][0]
    assert row["name"] == NAMES[row["class"]]
    assert len(row["top"]) == 3
    assert [c["confidence"] for c in row["top"]] == sorted((c["confidence"] for c in row["top"]), reverse=True)
    odd = server.http.get("/healthz", headers={"X-Request-ID": "no spaces; or tricks"})
    assert len(odd.headers["x-request-id"]) == 32


def test_the_status_shows_how_it_goes(server: Live) -> None:
    for number in range(3):
        server.predict("shown", number, adapt="wait")
    server.predict("shown", 9, adapt="off")
    status = server.settled("shown")
    assert (status["images"], status["adapted_batches"], status["seq"]) == (16, 3, 4)
    assert status["unsaved_batches"] == 3
    assert status["durable_through"] == 0
    assert 0 < status["confidence"] <= 1
    assert len(status["recent_confidence"]) == 4
    assert sum(part["share"] for part in status["class_balance"]) == pytest.approx(1)
    server.good("POST", "/v1/streams/shown/snapshot")
    status = server.status("shown")
    assert status["drift"] > 0
    assert status["unsaved_batches"] == 0
    assert status["durable_through"] == status["seq"]
    text = server.http.get("/metrics").text
    assert 'dpl_stream_adapted_batches{stream="shown"} 3.0' in text
    assert 'dpl_adaptations_total{result="off"}' in text


def test_methods_that_answer_after_their_update_are_found(tmp_path: Path) -> None:
    with live(tmp_path / "tent", method="tent") as server:
        assert server.good("GET", "/v1/server")["answers_first"] is True
    with live(tmp_path / "t3a", method="t3a") as server:
        assert server.good("GET", "/v1/server")["answers_first"] is False
        model = adaptive("t3a")
        for number in range(3):
            answer = server.predict("cam", number, probabilities=True).json()
            assert answer["adaptation"]["status"] == "done"
            got = torch.tensor([row["probabilities"] for row in answer["predictions"]])
            assert torch.equal(got, model(batch(number)).softmax(1))


@pytest.mark.parametrize(
    ("body", "kind", "hint"),
    [
        (b"", "application/json", "not valid JSON"),
        (b"{", "application/json", "not valid JSON"),
        (b"[" * 100_000, "application/json", "nested too deeply"),
        (b'{"arrays": ' + b"[" * 500 + b"]" * 500 + b"}", "application/json", "arrays"),
        (b'{"arrays": [[NaN]]}', "application/json", "NaN"),
        (b'{"arrays": [[[1e999]]]}', "application/json", "shape"),
        (b'{"arrays": [[1, 2], [3]]}', "application/json", "lengths"),
        (b'{"arrays": [["a"]]}', "application/json", "numbers"),
        (b'{"arrays": {}}', "application/json", "list"),
        (b'{"arrays": []}', "application/json", "0 images"),
        (b'{"images": [1]}', "application/json", "base64"),
        (b'{"images": ["%%%"]}', "application/json", "base64"),
        (b'{"images": ["AAAA"]}', "application/json", "not an image"),
        (b'{"images": [], "arrays": []}', "application/json", "either"),
        (b'{"images": ["AAAA"], "mode": 1}', "application/json", "mode"),
        (b"null", "application/json", "object"),
        (b"\xff\xfe\x00", "application/json", "not valid JSON"),
        (b"abc", "application/octet-stream", "X-Shape"),
        (b"abc", "text/plain", "Content-Type"),
        (b"abc", "image/png", "not an image"),
        (b"", "image/jpeg", "not an image"),
    ],
)
def test_malformed_bodies_get_422_and_a_reason(server: Live, body: bytes, kind: str, hint: str) -> None:
    answer = server.http.post("/v1/streams/odd/predict", content=body, headers={"Content-Type": kind})
    assert answer.status_code == 422, answer.text
    assert hint in answer.json()["error"]["message"]
    assert server.http.get("/v1/streams/odd").status_code == 404  # nothing was made of it


@pytest.mark.parametrize("shape", ["", "4", "4,3,32", "0,3,32,32", "-1,3,32,32", "4,3,32,33", "a,b", "9,3,32,32"])
def test_wrong_shapes_get_422(server: Live, shape: str) -> None:
    arguments = raw(batch(0))
    arguments["headers"]["X-Shape"] = shape
    answer = server.http.post("/v1/streams/odd/predict", **arguments)
    assert answer.status_code == 422
    assert "expected" in answer.json()["error"]["message"]


def test_broken_forms_are_refused(server: Live) -> None:
    url = "/v1/streams/odd/predict"
    for content, kind in [
        (b"garbage", "multipart/form-data; boundary=x"),
        (b"garbage", "multipart/form-data"),
        (b"--x\r\nContent-Disposition: form-data\r\n\r\n\r\n--x--", "multipart/form-data; boundary=x"),
    ]:
        answer = server.http.post(url, content=content, headers={"Content-Type": kind})
        assert answer.status_code in (400, 422), answer.text
        assert answer.json()["error"]["message"]
    assert server.http.post(url, files=[("images", ("a", picture()))] * 9).status_code in (400, 422)
    field = server.http.post(url, data={"images": "text"}, files=[("images", ("a", picture()))])
    assert field.status_code == 422
    assert "no files" in field.json()["error"]["message"]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_non_finite_rows_are_named_and_change_nothing(server: Live, value: float) -> None:
    server.predict("finite", 1, adapt="wait")
    before = server.state("finite")
    images = batch(2)
    images[2, 0, 3, 3] = value
    answer = server.http.post("/v1/streams/finite/predict", **raw(images))
    assert answer.status_code == 422
    assert "[2]" in answer.json()["error"]["message"]
    after = server.state("finite")
    assert all(torch.equal(before[key], after[key]) for key in before)


def test_overflow_inside_the_network_is_no_answer(tmp_path: Path) -> None:
    with live(tmp_path, method="dpl") as server:
        server.predict("cam", 1, adapt="wait")
        before = server.state("cam")
        huge = torch.rand(4, 3, 32, 32) * 3.4e38
        for adapt in ("auto", "wait"):
            answer = server.http.post(f"/v1/streams/cam/predict?adapt={adapt}", **raw(huge))
            assert answer.status_code == 422
            assert "non-finite" in answer.json()["error"]["message"]
        after = server.state("cam")
        assert all(torch.equal(before[key], after[key]) for key in before)
        assert server.predict("cam", 2).status_code == 200


def test_json_has_no_nan() -> None:
    text = SafeJSON({"a": float("nan"), "b": [1.5, float("inf"), {"c": -float("inf")}]}).body
    assert json.loads(text, parse_constant=pytest.fail) == {"a": None, "b": [1.5, None, {"c": None}]}


@pytest.mark.parametrize("query", ["adapt=maybe", "top=0", "top=101", "top=x", "probabilities=5"])
def test_wrong_queries_get_422(server: Live, query: str) -> None:
    answer = server.http.post(f"/v1/streams/odd/predict?{query}", **raw(batch(0)))
    assert answer.status_code == 422
    assert answer.json()["error"]["message"]


def test_wrong_methods_and_paths(server: Live) -> None:
    assert server.http.get("/v1/streams/cam/predict").status_code == 405
    assert server.http.get("/nothing/here").status_code == 404
    assert server.http.get("/nothing/here").json()["error"]["status"] == 404
    assert server.http.post("/v1/streams/odd2/rollback", content=b"{").status_code == 422
    server.predict("odd3", 1)
    assert server.http.post("/v1/streams/odd3/rollback", json={"to": -1}).status_code == 422
    assert server.http.post("/v1/streams/odd3/rollback", json={"two": 1}).status_code == 422


def test_the_api_describes_itself(server: Live) -> None:
    api = server.good("GET", "/openapi.json")
    assert "/v1/streams/{stream_id}/predict" in api["paths"]
    body = api["paths"]["/v1/streams/{stream_id}/predict"]["post"]["requestBody"]["content"]
    assert {"multipart/form-data", "application/json", "application/octet-stream"} <= set(body)
