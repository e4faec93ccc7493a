"""Attacks on `dpl serve` by one client, while another tenant predicts:  python benchmarks/serve_attacks.py

The table has, for each attack, how long the other tenant's predictions took, how many of them failed, and how much the
memory of the server and its processes grew. `--source DIR` starts another version of the package (its `src` folder).
Everything runs on 127.0.0.1 and stops by itself.
"""

import argparse
import io
import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import numpy as np
import torch
from PIL import Image

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "serve"))

from exhaustion import connect, head, rle_bmp, slow_json, tiff_with_large_tile
from live import Process, batch, raw

MEGABYTE = 2**20
ATTACKER = {"Authorization": "Bearer the-token-of-the-attacker"}
OTHER = {"Authorization": "Bearer the-token-of-the-tenant"}
TOKENS = "the-token-of-the-attacker bad-\nthe-token-of-the-tenant good-\n"
ADDRESS = "127.0.0.2"  # the attacker's
SLOW_SYNC = """
import os, pathlib, time
_sync = os.fsync
def _slow(handle):
    time.sleep(float(pathlib.Path({path!r}).read_text()))
    _sync(handle)
os.fsync = _slow
"""


@dataclass
class Target:
    """The server under attack."""

    process: Process
    delay: Path  # seconds of every fsync
    end: float = 0.0

    @property
    def port(self) -> int:
        return int(urlsplit(self.process.url).port or 0)

    @property
    def goes_on(self) -> bool:
        return time.monotonic() < self.end

    def post(self, stream: str, act: str = "predict", **arguments: object) -> None:
        """One request of the attacker; its result does not matter."""
        headers = {**ATTACKER, **arguments.pop("headers", {})}  # type: ignore[dict-item]
        with suppress(httpx.TransportError):
            httpx.post(f"{self.process.url}/v1/streams/{stream}/{act}", headers=headers, timeout=60, **arguments)  # type: ignore[arg-type]


def nothing(target: Target) -> None:
    while target.goes_on:
        time.sleep(0.1)


def idle_connections(target: Target) -> None:
    """580 connections that send nothing, opened again when they are closed; no token."""
    with ExitStack() as stack:
        while target.goes_on:
            with suppress(OSError):
                for _ in range(580):
                    stack.enter_context(connect(target.port, ADDRESS, 5))
            nothing(target)


def long_headers(target: Target) -> None:
    """A header of 40 MB, as short fields; no token."""
    while target.goes_on:
        with suppress(OSError), connect(target.port, ADDRESS, 5) as line:
            line.sendall(b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\n")
            for _ in range(400):
                line.sendall(b"a:b\r\n" * 20_000)
            nothing(target)
        time.sleep(0.05)


def tiff_tile(target: Target) -> None:
    """A TIFF of 1 x 1 pixel with a tile of 46,320 x 46,320, 2 MB."""
    while target.goes_on:
        target.post("bad-1", content=large_tile(), headers={"Content-Type": "image/tiff"})


@cache
def large_tile() -> bytes:
    return tiff_with_large_tile()


@cache
def large_png() -> bytes:
    out = io.BytesIO()
    Image.new("RGBA", (6000, 4000)).save(out, "PNG", compress_level=1)
    return out.getvalue()


def costly_images(target: Target) -> None:
    """BMPs with run-length encoding in turn with 8 PNGs of 24 megapixels; 4 requests at once."""
    files = [[("images", ("a.bmp", rle_bmp()))] * 7, [("images", ("a.png", large_png()))] * 8]

    def send(number: int) -> None:
        while target.goes_on:
            target.post(f"bad-{number}", files=files[number % 2])

    in_threads(4, send)


def slow_uploads(target: Target) -> None:
    """64 uploads of one byte."""
    with ExitStack() as stack:
        while target.goes_on:
            with suppress(OSError):
                for i in range(64):
                    line = stack.enter_context(connect(target.port, ADDRESS, 5))
                    headers = {"Content-Type": "image/png", **ATTACKER}
                    line.sendall(head(f"/v1/streams/bad-{i}/predict", 100_000, headers) + b"x")
            time.sleep(5)


def large_json(target: Target) -> None:
    """32 MB of empty lists; 2 requests at once."""
    body = slow_json(32 * MEGABYTE - 100)

    def send(number: int) -> None:
        while target.goes_on:
            target.post(f"bad-{number}", content=body, headers={"Content-Type": "application/json"})

    in_threads(2, send)


def slow_disk(target: Target) -> None:
    """An fsync takes 20 s, while 4 streams are adapted, reset and saved."""
    target.delay.write_text("20")

    def send(number: int) -> None:
        while target.goes_on:
            target.post(f"bad-{number}", **raw(batch(number)))
            target.post(f"bad-{number}", ("reset", "snapshot")[number % 2])

    in_threads(4, send)


def in_threads(count: int, work: Callable[[int], None]) -> None:
    threads = [threading.Thread(target=work, args=(i,), daemon=True) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)


ATTACKS = {
    "none": nothing,
    "idle connections": idle_connections,
    "long headers": long_headers,
    "TIFF tile": tiff_tile,
    "costly images": costly_images,
    "slow uploads": slow_uploads,
    "large JSON": large_json,
    "slow disk": slow_disk,
}


@dataclass
class Measured:
    """What the other tenant saw, and the memory."""

    seconds: list[float] = field(default_factory=list)
    failed: int = 0
    health_failed: int = 0
    grown: float = 0.0
    stop: float = 0.0

    def row(self, name: str) -> str:
        times = np.array(self.seconds or [float("nan")])
        median, late = np.quantile(times, [0.5, 0.99])
        return (f"| {name} | {len(times)} | {self.failed} | {median:.3f} | {late:.3f} | {times.max():.2f} "
                f"| {self.grown:.0f} | {self.health_failed} | {self.stop:.1f} |")  # fmt: skip


def attack(name: str, seconds: float, source: Path | None) -> Measured:
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        delay, tokens = folder / "delay", folder / "tokens"
        delay.write_text("0")
        tokens.write_text(TOKENS)
        tokens.chmod(0o600)
        prelude = SLOW_SYNC.format(path=str(delay))
        target = Target(Process(folder, "--token-file", str(tokens), prelude=prelude, source=source), delay)
        measured = Measured()
        try:
            watch(target, name, seconds, measured)
        finally:
            start = time.monotonic()
            target.process.stop()
            measured.stop = time.monotonic() - start
    return measured


def watch(target: Target, name: str, seconds: float, measured: Measured) -> None:
    """Predict as the other tenant while the attack runs, and look at the memory."""
    with httpx.Client(base_url=target.process.url, headers=OTHER, timeout=30) as http:
        image = io.BytesIO()
        Image.new("RGB", (64, 64)).save(image, "JPEG")
        for _ in range(3):  # the processes that decode have started
            http.post("/v1/streams/good-1/predict", files=[("images", ("a", image.getvalue()))]).raise_for_status()
        before, target.end = memory(target.process), time.monotonic() + seconds
        threads = [
            threading.Thread(target=ATTACKS[name], args=(target,), daemon=True),
            threading.Thread(target=weigh, args=(target, before, measured), daemon=True),
        ]
        for thread in threads:
            thread.start()
        number = 0
        while target.goes_on:
            number += 1
            ask(http, number, image.getvalue(), measured)
            time.sleep(0.02)
        target.delay.write_text("0" if name != "slow disk" else "20")
        for thread in threads:
            thread.join(60)


def weigh(target: Target, before: float, measured: Measured) -> None:
    while target.goes_on:
        measured.grown = max(measured.grown, memory(target.process) - before)
        time.sleep(0.5)


def ask(http: httpx.Client, number: int, image: bytes, measured: Measured) -> None:
    """One prediction, in turn as an array and as an image; health is asked on a new connection."""
    arguments = raw(batch(number)) if number % 2 else {"files": [("images", ("a", image))]}
    start = time.monotonic()
    try:
        measured.failed += http.post("/v1/streams/good-1/predict", **arguments).status_code != 200
    except httpx.TransportError:
        measured.failed += 1
    measured.seconds.append(time.monotonic() - start)
    if number % 10 == 0:
        try:
            measured.health_failed += httpx.get(f"{http.base_url}/healthz", timeout=5).status_code != 200
        except httpx.TransportError:
            measured.health_failed += 1


def memory(process: Process) -> float:
    """Megabytes of the server and of the processes that it has started; shared pages count once."""
    total, pending = 0.0, [process.process.pid]
    while pending:
        pid = pending.pop()
        with suppress(OSError):
            for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
                if line.startswith("Pss:"):
                    total += int(line.split()[1]) / 1024
            for task in Path(f"/proc/{pid}/task").iterdir():
                pending += [int(child) for child in (task / "children").read_text().split()]
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--attacks", nargs="*", choices=list(ATTACKS), default=list(ATTACKS))
    parser.add_argument("--seconds", type=float, default=15.0, help="of each attack")
    parser.add_argument("--source", type=Path, help="src folder of another version")
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores; {args.seconds:.0f} s each")
    print("| attack | predictions | failed | median s | 99 % s | longest s | memory MB | health failed | stop s |")
    print("|---|---|---|---|---|---|---|---|---|")
    large_tile(), large_png()  # made before the clock runs
    results = {}
    for name in args.attacks:
        results[name] = attack(name, min(args.seconds, 120.0), args.source)
        print(results[name].row(name), flush=True)
    bad = [name for name, found in results.items() if found.grown > 300 or np.quantile(found.seconds, 0.99) > 1]
    print(json.dumps({"beyond 1 s or 300 MB": bad}))


if __name__ == "__main__":
    main()
