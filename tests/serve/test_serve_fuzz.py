"""Bytes that nobody planned: image files, JSON, forms, manifests and raw HTTP end in a result or a refusal.

`DPL_FUZZ=5000` runs more examples of each kind; `make abuse` does. Inputs that once broke something are examples here.
"""

import io
import os
import shutil
import socket
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from exhaustion import connect, rle_bmp, slow_json, tiff_with_large_tile
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from live import SHAPE, Live, live
from PIL import Image

from dpl.core.errors import DplError
from dpl.data import square
from dpl.serve.images import INFER, Body, RequestDecoder
from dpl.serve.store import StreamStore

EXAMPLES = int(os.environ.get("DPL_FUZZ", "60"))
FUZZ = settings(
    max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck), derandomize=EXAMPLES <= 60
)
DECODER = RequestDecoder(square(32), SHAPE, max_batch=4, max_pixels=100_000)
KINDS = ("image/png", "application/json", "application/octet-stream", "multipart/form-data; boundary=x", INFER)


@cache
def pictures() -> tuple[bytes, ...]:
    """Small valid files of every format that is accepted."""
    pixels = Image.fromarray(np.random.default_rng(0).integers(0, 256, (9, 7, 3), dtype=np.uint8))
    made = []
    for kind, mode in (("JPEG", "RGB"), ("JPEG", "CMYK"), ("PNG", "RGBA"), ("PNG", "P"), ("GIF", "P"), ("BMP", "RGB"),
                       ("WEBP", "RGB")):  # fmt: skip
        out = io.BytesIO()
        pixels.convert(mode).save(out, kind)
        made.append(out.getvalue())
    return (*made, rle_bmp(16))


@st.composite
def damaged(draw: st.DrawFn, sources: tuple[bytes, ...]) -> bytes:
    """A valid input with some bytes changed, removed or added."""
    data = bytearray(draw(st.sampled_from(sources)))
    for _ in range(draw(st.integers(0, 6))):
        place = draw(st.integers(0, max(0, len(data) - 1)))
        act = draw(st.sampled_from(("change", "cut", "insert")))
        if act == "cut":
            del data[place : place + draw(st.integers(1, 40))]
        elif act == "insert":
            data[place:place] = draw(st.binary(max_size=12))
        elif data:
            data[place] = draw(st.integers(0, 255))
    return bytes(data)


def decoded(body: Body) -> None:
    """A batch of the right shape, or an error of ours."""
    try:
        images, _ = DECODER.from_body(body)
    except DplError:
        return
    assert tuple(images.shape[1:]) == SHAPE
    assert 1 <= len(images) <= 4
    assert images.isfinite().all()


@FUZZ
@given(data=st.deferred(lambda: damaged(pictures())) | st.binary(max_size=200))
@example(data=tiff_with_large_tile(400))
@example(data=rle_bmp())
@example(data=b"")
def test_image_files(data: bytes) -> None:
    decoded(Body("image/png", data))


JSON = (
    b'{"images": ["iVBORw0KGgo="]}', b'{"arrays": [[[[0.5]]]]}', b'{"inputs": [{"datatype": "FP32", "shape": [1]}]}',
    b'{"id": "a", "inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 3, 32, 32], "data": [1, 2]}]}',
)  # fmt: skip
FORM = b'--x\r\nContent-Disposition: form-data; name="images"; filename="a"\r\n\r\nabc\r\n--x--\r\n'


@FUZZ
@given(data=damaged((*JSON, FORM)) | st.binary(max_size=100), kind=st.sampled_from(KINDS),
       shape=st.none() | st.text(max_size=12) | st.sampled_from(("1,3,32,32", "10", "-1", "9" * 30)))  # fmt: skip
@example(data=slow_json(100_000), kind="application/json", shape=None)
@example(data=b"[" * 100_000, kind=INFER, shape=None)
@example(data=b'{"arrays": [[' + b"9" * 10_000 + b"]]}", kind="application/json", shape=None)
@example(data=b"--x\r\nContent-Disposition: form-data\r\n\r\n\r\n--x--", kind=KINDS[3], shape=None)
@example(data=b'{"inputs": [{"datatype": "FP32", "shape": [1e400]}]}', kind=INFER, shape=None)
def test_bodies(data: bytes, kind: str, shape: str | None) -> None:
    decoded(Body(kind, data, shape))


@pytest.fixture(scope="module")
def snapshot(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("state")
    with live(folder) as server:
        server.predict("cam", 1, adapt="wait")
        server.good("POST", "/v1/streams/cam/snapshot")
    return max((folder / "streams" / "cam").iterdir())


@FUZZ
@given(data=st.data())
def test_manifests(snapshot: Path, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """A damaged manifest is a problem that is named, never an error."""
    good = (snapshot / "manifest.json").read_bytes()
    folder = tmp_path_factory.mktemp("copy")
    copy = folder / "streams" / "cam" / snapshot.name
    shutil.copytree(snapshot, copy)
    changed = data.draw(damaged((good,)) | st.sampled_from((b"", b"[" * 200_000, b"null", b"{}", b'{"files": 1}')))
    (copy / "manifest.json").write_bytes(changed)
    store = StreamStore(folder, {}, keep=5)
    try:
        found, problems = store.newest("cam")
        assert (found is not None) == (changed == good)
        assert len(problems) == (changed != good)
        store.counts("cam")
    finally:
        store.close()
        shutil.rmtree(folder)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    with live(tmp_path_factory.mktemp("live"), header_timeout=1.0) as running:
        running.predict("cam", 1)
        yield running


REQUESTS = (
    b"GET /v1/streams HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
    b"POST /v1/streams/cam/predict HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 3\r\n\r\nabc",
    b"POST /v1/streams/cam/rollback HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: chunked\r\n\r\n"
    b"2\r\n{}\r\n0\r\n\r\n",
    b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n",
)


@FUZZ
@given(data=damaged(REQUESTS) | st.binary(max_size=200))
@example(data=b"GET / HTTP/1.1\r\n" + b"a:b\r\n" * 40_000)
@example(data=b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
def test_raw_http(server: Live, data: bytes) -> None:
    with connect(server.port, seconds=10) as line:
        try:
            line.sendall(data)
            line.shutdown(socket.SHUT_WR)
            response = b"".join(iter(lambda: line.recv(65536), b""))
        except OSError:  # the server has closed the connection
            return
    assert b" 500 " not in response.split(b"\r\n")[0]


def test_the_server_is_as_good_as_before(server: Live) -> None:
    assert server.predict("cam", 2).status_code == 200
    assert server.good("GET", "/healthz") == {"status": "ok", "problems": []}
    assert server.server.metrics.failures._value.get() == 0
