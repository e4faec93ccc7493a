"""Requests that mean harm: none may do anything, each must earn a clear refusal."""

import http.client
import io
import json
import os
import pickle
import struct
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import torch

MEGABYTE = 2**20
RAW = {"Content-Type": "application/octet-stream", "X-Shape": "1,3,32,32"}
JSON = {"Content-Type": "application/json"}
KINDS = ("image/png", "application/json", "application/octet-stream", "multipart/form-data; boundary=x")
NAMES = ("..", "%2e%2e", "%2e%2e%2f%2e%2e%2fetc", "a%2fb", "a%00b", ".git", "a%0ab", "%252e%252e", "~root", "%24HOME",
         "..%5c..%5cx", "a" * 101, "-rf", "%ff", "a;b", "con%20")  # fmt: skip


@dataclass(frozen=True)
class Attack:
    """One request, and the answers that refuse it."""

    name: str
    content: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)
    path: str = "cam/predict"
    method: str = "POST"
    refusals: tuple[int, ...] = (413, 422)
    claimed: int | None = None  # a length other than the true one


class Evil:
    """Leaves a trace where it is unpickled."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple:
        return os.mkdir, (str(self.trace),)


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


@cache
def png(width: int, height: int, rows: int) -> bytes:
    """A grey PNG whose header promises `width` x `height` pixels and whose data has `rows` rows, all black."""
    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    packer = zlib.compressobj(9)
    row = bytes(width + 1)
    data = b"".join(packer.compress(row) for _ in range(rows)) + packer.flush()
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", data) + chunk(b"IEND", b"")


def pickles(trace: Path) -> dict[str, bytes]:
    """Files that would leave a trace if anything unpickled them."""
    saved, array, archive = io.BytesIO(), io.BytesIO(), io.BytesIO()
    torch.save({"state": Evil(trace)}, saved)
    np.save(array, np.array([Evil(trace)], dtype=object), allow_pickle=True)
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("../../evil.pkl", pickle.dumps(Evil(trace)))
    return {
        "pickle": pickle.dumps(Evil(trace)),
        "torch file": saved.getvalue(),
        "npy": array.getvalue(),
        "zip": archive.getvalue(),
    }


def attacks(trace: Path) -> Iterator[Attack]:
    """All of them."""
    for name, content in pickles(trace).items():
        for kind in KINDS:
            headers = {"Content-Type": kind, "X-Shape": "1,3,32,32"}
            yield Attack(f"{name} as {kind}", _form(content) if "form" in kind else content, headers)
    yaml = f'!!python/object/apply:os.mkdir ["{trace}"]'.encode()
    yield Attack("YAML tag as JSON", yaml, JSON)
    yield Attack("YAML tag as YAML", yaml, {"Content-Type": "application/yaml"})
    yield Attack("YAML tag where to roll back to", yaml, JSON, "known/rollback")
    for name, bomb in bombs().items():
        yield Attack(f"image bomb, {name}", bomb, {"Content-Type": "image/png"})
    for name in NAMES:
        yield Attack(
            f"path trick {name[:20]}", bytes(4 * 3 * 32 * 32), RAW, f"{name}/predict", refusals=(404, 405, 422)
        )
        yield Attack(f"path trick {name[:20]}, delete", b"", {}, name, "DELETE", (404, 405, 422))
    yield from _oversized()
    yield from _malformed()


def bombs() -> dict[str, bytes]:
    """Small files that would be large images."""
    return {
        "169 megapixels in 0.2 MB": png(13_000, 13_000, 13_000),
        "81 megapixels": png(9_000, 9_000, 9_000),
        "3,600 megapixels promised": png(60_000, 60_000, 1),
        "a header of 2**31 x 2**31": _lying_header(),
    }


def _lying_header() -> bytes:
    header = struct.pack(">IIBBBBB", 2**31 - 1, 2**31 - 1, 8, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"\0")) + chunk(b"IEND", b"")


def _oversized() -> Iterator[Attack]:
    for kind in KINDS:
        yield Attack(f"oversized body as {kind}", bytes(5 * MEGABYTE), {"Content-Type": kind}, refusals=(413,))
        yield Attack(f"100 GB promised as {kind}", b"x", {"Content-Type": kind}, refusals=(413,), claimed=100 * 2**30)
    yield Attack("a thousand files", _form(*[b"x"] * 1000), {"Content-Type": KINDS[3]}, refusals=(400, 422))
    yield Attack("oversized snapshot request", bytes(5 * MEGABYTE), {}, "known/snapshot", refusals=(413,))


def _malformed() -> Iterator[Attack]:
    documents = {
        "nested 100,000 deep": b'{"arrays":' + b"[" * 100_000,
        "a number of 10,000 digits": b'{"arrays":[[' + b"9" * 10_000 + b"]]}",
        "NaN": b'{"arrays": [NaN]}',
        "a string for images": b'{"images": "abc"}',
        "no base64": b'{"images": ["***"]}',
        "an unknown key": b'{"arrays": [[1]], "__class__": "os"}',
        "not UTF-8": b"\xff\xfe\xfd",
        "ragged rows": b'{"arrays": [[[1,2],[3]]]}',
    }
    for name, content in documents.items():
        yield Attack(f"JSON: {name}", content, JSON)
    for shape in ("", "-1,3,32,32", "1e9,3,32,32", "999999999999,3,32,32", "1,3,32", "1,3,32,32,1", "a,b,c,d"):
        yield Attack(f"X-Shape {shape!r}", bytes(4 * 3 * 32 * 32), RAW | {"X-Shape": shape})
    for text in (
        b"%!PS-Adobe-3.0\nshowpage",
        b"<svg xmlns='http://www.w3.org/2000/svg'/>",
        b"",
        b"GIF89a",
        b"\xff\xd8\xff",
    ):
        yield Attack(f"image {text[:8]!r}", text, {"Content-Type": "image/jpeg"})
    query = {"adapt=rm", "top=0", "top=1e9", "probabilities=perhaps"}
    for part in sorted(query):
        yield Attack(f"query {part}", bytes(4 * 3 * 32 * 32), RAW, f"cam/predict?{part}")
    for body in (b'{"to": -1}', b'{"to": "../.."}', b'{"to": 1e400}', b'{"from": 1}', b"[]"):
        yield Attack(f"rollback {body!r}", body, JSON, "known/rollback")


def _form(*files: bytes) -> bytes:
    head = b'--x\r\nContent-Disposition: form-data; name="images"; filename="../../../etc/passwd"\r\n\r\n'
    return b"".join(head + data + b"\r\n" for data in files) + b"--x--\r\n"


def launch(url: str, attack: Attack) -> tuple[int, str]:
    """Send a request as it is, nothing tidied; return the status and the message of the refusal."""
    address = urlsplit(url)
    line = http.client.HTTPConnection(address.hostname or "", address.port, timeout=300)
    try:
        line.putrequest(attack.method, f"/v1/streams/{attack.path}", skip_accept_encoding=True)
        length = len(attack.content) if attack.claimed is None else attack.claimed
        for name, value in (attack.headers | {"Content-Length": str(length)}).items():
            line.putheader(name, value)
        line.endheaders(attack.content)
        answer = line.getresponse()
        return answer.status, str(json.loads(answer.read())["error"]["message"])
    finally:
        line.close()


def refused(url: str, attack: Attack) -> None:
    """Launch an attack; AssertionError unless it earns a refusal that says something."""
    status, message = launch(url, attack)
    assert status in attack.refusals, (attack.name, status, message)
    assert len(message) > 5, (attack.name, message)
