"""Bytes that nobody planned, for whoever invents them: hypothesis in the tests, atheris in `benchmarks/fuzz.py`.

A target takes bytes and returns; anything that it raises is a finding. `CORPUS` has, for each target, valid inputs to
start from and inputs that once broke something.
"""

import asyncio
import io
import json
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import uvicorn
from exhaustion import rle_bmp, slow_json, tiff_with_large_tile
from live import SHAPE, open_live
from PIL import Image
from uvicorn.server import ServerState

from dpl.bench.section import read_sections
from dpl.core.errors import DplError
from dpl.data import square
from dpl.serve.app import make_app
from dpl.serve.decoding import Body, RequestDecoder
from dpl.serve.middleware import limited_protocol
from dpl.serve.store import StreamSnapshot, StreamStore, size_of
from dpl.snapshot.files import _digest, _dump

DECODER = RequestDecoder(square(32), SHAPE, max_batch=4, max_pixels=100_000)
FORM_TYPE = "multipart/form-data; boundary=x"
KINDS = ("image/png", "application/json", "application/octet-stream", FORM_TYPE)
SHAPES = (None, "1,3,32,32", "10", "-1", "9" * 30, "1,3,32,32,0", "\N{SUPERSCRIPT TWO}")


def decoded(body: Body) -> None:
    """A batch of the right shape, or an error of ours."""
    try:
        images, _ = DECODER.from_body(body)
    except DplError:
        return
    assert tuple(images.shape[1:]) == SHAPE
    assert 1 <= len(images) <= 4
    assert images.isfinite().all()


def image(data: bytes) -> None:
    decoded(Body("image/png", data))


def body(data: bytes) -> None:
    """The first two bytes choose the content type and the header with the shape."""
    kind, shape, content = data[:1], data[1:2], data[2:]
    decoded(Body(KINDS[ord(kind or b"\0") % len(KINDS)], content, SHAPES[ord(shape or b"\0") % len(SHAPES)]))


def manifest(data: bytes) -> None:
    """A damaged manifest, or a forged one with a valid checksum, is a problem that is named, never an error."""
    store, place = stored_snapshot()
    for content in (data, sealed(data)):
        place.write_bytes(content)
        found, problems = store.newest("cam")
        assert (found is None) == bool(problems)
        adapted, images = store.counts("cam")
        assert adapted >= 0
        assert images >= 0
        if found is not None:
            assert found.adapted + found.images + size_of(found.difference) >= 0
            assert all(isinstance(name, str) for name in found.difference)


def sealed(data: bytes) -> bytes:
    """Return the manifest with the checksum that belongs to it, as someone who can write to the folder would."""
    try:
        record = json.loads(data)
        record.pop("manifest_sha256", None)
        return _dump({**record, "manifest_sha256": _digest(record)})
    except (ValueError, AttributeError, TypeError, RecursionError):
        return data


@cache
def stored_snapshot() -> tuple[StreamStore, Path]:
    folder = Path(tempfile.mkdtemp(prefix="dpl-fuzz-"))
    store = StreamStore(folder, {"method": "tent"}, keep=5)
    snapshot = StreamSnapshot(2, 1, "auto", {"weight": torch.zeros(2), "bias": None}, 1, 4)
    store.write("cam", snapshot)
    return store, folder / "streams" / "cam" / str(snapshot) / "manifest.json"


def experiment(data: bytes) -> None:
    place = experiment_file()
    place.write_bytes(data)
    try:
        title, sections = read_sections(place)
    except DplError:
        return
    assert isinstance(title, str)
    assert sections


@cache
def experiment_file() -> Path:
    return Path(tempfile.mkdtemp(prefix="dpl-fuzz-")) / "grid.yaml"


def http(data: bytes) -> None:
    """What a connection brings, through protocol and application; the answer is never a 500."""
    application().connect(data)


async def decode_here(_tenant: str, body: Body) -> tuple[torch.Tensor, dict[str, Any]]:
    """Decode in this process: `image` and `body` are about that, and a process for each connection takes long."""
    return DECODER.from_body(body)


class Application:
    """The web application behind the HTTP parser, without a socket."""

    def __init__(self) -> None:
        server = open_live(Path(tempfile.mkdtemp(prefix="dpl-fuzz-")), live_models=1, timeout=1.0)
        server.decoders.decode = decode_here  # type: ignore[method-assign]
        self.config = uvicorn.Config(
            make_app(server), http=limited_protocol(server.settings), ws="none", log_level="error",
            h11_max_incomplete_event_size=server.settings.max_header,
        )  # fmt: skip
        self.config.load()
        self.loop = asyncio.new_event_loop()
        self.failures = server.metrics.failures

    def connect(self, data: bytes) -> None:
        self.loop.run_until_complete(self._connect(data))

    async def _connect(self, data: bytes) -> None:
        state, line = ServerState(), Line()
        protocol: Any = self.config.http_protocol_class(self.config, state, {}, self.loop)  # type: ignore[call-arg]
        protocol.connection_made(line)
        for start in range(0, len(data), 1000):
            if not line.is_closing():
                protocol.data_received(data[start : start + 1000])
                await asyncio.sleep(0)
        if state.tasks:
            await asyncio.wait(state.tasks, timeout=0.05)
        protocol.connection_lost(None)
        if state.tasks:
            await asyncio.wait(state.tasks, timeout=30)
        assert not state.tasks
        assert not line.written or line.written.startswith(b"HTTP/1.1 ")
        assert b"HTTP/1.1 500" not in line.written
        assert self.failures._value.get() == 0


class Line(asyncio.Transport):
    """A connection that keeps what is written to it."""

    def __init__(self) -> None:
        super().__init__({"peername": ("127.0.0.1", 1), "sockname": ("127.0.0.1", 2)})
        self.written, self.closing = b"", False

    def write(self, data: Any) -> None:
        self.written += data

    def is_closing(self) -> bool:
        return self.closing

    def close(self) -> None:
        self.closing = True

    abort = pause_reading = resume_reading = lambda self: None


@cache
def application() -> Application:
    return Application()


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


JSON = (
    b'{"images": ["iVBORw0KGgo="]}', b'{"arrays": [[[[0.5]]]]}', b'{"inputs": [{"datatype": "FP32", "shape": [1]}]}',
    b'{"id": "a", "inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 3, 32, 32], "data": [1, 2]}]}',
)  # fmt: skip
FORM = b'--x\r\nContent-Disposition: form-data; name="images"; filename="a"\r\n\r\nabc\r\n--x--\r\n'
REQUESTS = (
    b"GET /v1/streams HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
    b"POST /v1/streams/cam/predict HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 3\r\n\r\nabc",
    b"POST /v1/streams/cam/rollback HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: chunked\r\n\r\n"
    b"2\r\n{}\r\n0\r\n\r\n",
    b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n",
)
EXPERIMENT = b"""title: T
dataset: digits
network: debug_cnn
seeds: [0, 1]
batch_size: 16
methods:
  tent: {lr: 1e-3}
  dpl:
sections:
  - name: a
  - name: b
    protocol: mixed
"""


def bodies() -> list[bytes]:
    """Bodies behind the two bytes that `body` reads: every document as every kind, and those that once cost much."""
    made = [
        bytes([kind, shape]) + content for kind in range(len(KINDS)) for shape in (0, 1) for content in (*JSON, FORM)
    ]
    costly = (b'{"arrays": [[' + b"9" * 10_000 + b"]]}", b'{"inputs": [{"datatype": "FP32", "shape": [1e400]}]}',
              b"[" * 20_000, slow_json(20_000), b"--x\r\nContent-Disposition: form-data\r\n\r\n\r\n--x--")  # fmt: skip
    return made + [bytes([kind, 0]) + content for kind in (1, 3) for content in costly]


def manifests() -> list[bytes]:
    good = stored_snapshot()[1].read_bytes()
    odd = {"adapted": "1", "images": None, "removed": 1, "files": 1, "format": 3, "seq": 1e400, "stream": []}
    return [good, b"", b"[" * 20_000, b"null", b"{}", *(_dump({**json.loads(good), k: v}) for k, v in odd.items())]


CORPUS: dict[Callable[[bytes], None], Callable[[], list[bytes]]] = {
    image: lambda: [*pictures(), tiff_with_large_tile(400), rle_bmp(), b""],
    body: bodies,
    manifest: manifests,
    experiment: lambda: [EXPERIMENT, b"methods: !!python/name:os.system", b"&a [*a]", b"a: &a {b: *a}", b"\x00", b"[]"],
    http: lambda: [*REQUESTS, b"GET / HTTP/1.1\r\n" + b"a:b\r\n" * 20_000, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"],
}
