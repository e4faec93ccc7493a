"""Bytes that nobody planned: image files, JSON, forms, manifests and raw HTTP end in a result or a refusal.

`DPL_FUZZ=5000` runs more examples of each kind; `make abuse` does. Inputs that once broke something are examples here.
"""

import os
import socket
from collections.abc import Iterator

import pytest
from exhaustion import connect, rle_bmp, slow_json, tiff_with_large_tile
from fuzzing import CORPUS, FORM, JSON, KINDS, REQUESTS, decoded, manifests, pictures
from fuzzing import experiment as read_experiment
from fuzzing import manifest as read_manifest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from live import Live, live

from dpl.serve.decoding import Body

EXAMPLES = int(os.environ.get("DPL_FUZZ", "60"))
FUZZ = settings(
    max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck), derandomize=EXAMPLES <= 60
)


@pytest.mark.parametrize("target", CORPUS, ids=lambda target: target.__name__)
def test_inputs_to_start_from_and_those_that_once_broke_something(target) -> None:
    for data in CORPUS[target]():
        target(data)


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


@FUZZ
@given(data=st.deferred(lambda: damaged(pictures())) | st.binary(max_size=200))
@example(data=tiff_with_large_tile(400))
@example(data=rle_bmp())
@example(data=b"")
def test_image_files(data: bytes) -> None:
    decoded(Body("image/png", data))


@FUZZ
@given(data=damaged((*JSON, FORM)) | st.binary(max_size=100), kind=st.sampled_from(KINDS),
       shape=st.none() | st.text(max_size=12) | st.sampled_from(("1,3,32,32", "10", "-1", "9" * 30)))  # fmt: skip
@example(data=slow_json(100_000), kind="application/json", shape=None)
@example(data=b"[" * 100_000, kind="application/json", shape=None)
@example(data=b'{"arrays": [[' + b"9" * 10_000 + b"]]}", kind="application/json", shape=None)
@example(data=b"--x\r\nContent-Disposition: form-data\r\n\r\n\r\n--x--", kind=KINDS[3], shape=None)
@example(data=b'{"inputs": [{"datatype": "FP32", "shape": [1e400]}]}', kind="application/json", shape=None)
def test_bodies(data: bytes, kind: str, shape: str | None) -> None:
    decoded(Body(kind, data, shape))


@FUZZ
@given(data=st.deferred(lambda: damaged(tuple(manifests()))))
def test_manifests(data: bytes) -> None:
    read_manifest(data)


@FUZZ
@given(data=st.deferred(lambda: damaged(tuple(CORPUS[read_experiment]()))))
def test_experiment_files(data: bytes) -> None:
    read_experiment(data)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    with live(tmp_path_factory.mktemp("live"), header_timeout=1.0) as running:
        running.predict("cam", 1)
        yield running


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
