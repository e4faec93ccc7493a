"""Inputs that cost a server much more than their sender: headers, images, JSON."""

import json
import socket
import struct
import zlib
from collections.abc import Mapping

HOST = "127.0.0.1"


def tiff_with_large_tile(side: int = 46_320) -> bytes:
    """A TIFF of 1 x 1 pixel whose one tile has `side` x `side` pixels, deflated."""
    packer = zlib.compressobj(9, wbits=-15)
    rows = next(count for count in range(min(side, 1200), 0, -1) if side % count == 0)
    block = packer.compress(bytes(side * rows)) + packer.flush(zlib.Z_FULL_FLUSH)  # can be repeated
    checksum = struct.pack(">HH", side * side % 65521, 1)  # of zeros
    data = b"\x78\xda" + block * (side // rows) + b"\x03\x00" + checksum
    tags = {256: 1, 257: 1, 258: 8, 259: 8, 262: 1, 277: 1, 322: side, 323: side, 324: 8, 325: len(data)}
    entries = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in sorted(tags.items()))
    directory = struct.pack("<H", len(tags)) + entries + bytes(4)
    return b"II*\0" + struct.pack("<I", 8 + len(data)) + data + directory


def rle_bmp(side: int = 4_990, data: bytes = bytes([0, 2, 255, 255]) * 8 + bytes([0, 1])) -> bytes:
    """A BMP of 1 KB with run-length encoding: Pillow decodes it in Python. The usual data skip almost all of it."""
    palette = bytes(1024)
    head = struct.pack("<IiiHHIIiiII", 40, side, side, 1, 8, 1, len(data), 0, 0, 256, 0)
    offset = 14 + 40 + len(palette)
    return b"BM" + struct.pack("<IHHI", offset + len(data), 0, 0, offset) + head + palette + data


def slow_json(size: int) -> bytes:
    """Millions of empty lists."""
    return b'{"arrays": [' + b"[]," * (size // 3) + b"[]]}"


def head(path: str, length: int, headers: Mapping[str, str] | None = None, method: str = "POST") -> bytes:
    """The header of a request."""
    lines = {"Host": HOST, "Content-Length": str(length), **(headers or {})}
    text = f"{method} {path} HTTP/1.1\r\n" + "".join(f"{name}: {value}\r\n" for name, value in lines.items()) + "\r\n"
    return text.encode()


def connect(port: int, source: str = HOST, seconds: float = 30.0) -> socket.socket:
    """A connection from one of this machine's addresses, which are all those that start with 127."""
    return socket.create_connection((HOST, port), timeout=seconds, source_address=(source, 0))


def answer(line: socket.socket) -> tuple[int, str]:
    """The status and the body of a response; 0 if the server closed the connection without one."""
    text = b""
    try:
        while b"\r\n\r\n" not in text or len(text) < _whole(text):
            part = line.recv(65536)
            if not part:
                break
            text += part
    except ConnectionError:
        pass
    start, _, body = text.partition(b"\r\n\r\n")
    return (int(start.split()[1]), body.decode()) if start else (0, "")


def _whole(text: bytes) -> int:
    start, _, _ = text.partition(b"\r\n\r\n")
    for entry in start.split(b"\r\n"):
        name, _, value = entry.partition(b":")
        if name.lower() == b"content-length":
            return len(start) + 4 + int(value)
    return len(text) + 1


def message(body: str) -> str:
    return str(json.loads(body)["error"]["message"])
