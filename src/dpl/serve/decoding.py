"""Decode the body of a request into a batch, in a process with limits of processor time and memory.

A body that exceeds a limit ends its process, which is replaced; so does a client that leaves. Nothing else is lost.
"""

import asyncio
import base64
import json
import logging
import multiprocessing
import os
import signal
import sys
import threading
from collections import defaultdict
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from python_multipart import create_form_parser
from torch import Tensor

from dpl.core.errors import DplError, InputError
from dpl.data.images import decode
from dpl.data.transforms import Evaluation
from dpl.serve.settings import ServeSettings

__all__ = ["Body", "DecoderPool", "RequestDecoder"]

Decoded = tuple[Tensor, dict[str, Any]]  # the images, and facts that the body has about itself
Floats = np.ndarray[Any, np.dtype[np.float32]]


@dataclass(frozen=True)
class Body:
    """The body of a request: its content type, its bytes, and a header: of an array its shape, of JSON its length."""

    kind: str
    content: bytes
    header: str | None = None


@dataclass(frozen=True)
class RequestDecoder:
    """Turns requests into batches for one network; limits are checked first."""

    transform: Evaluation
    shape: tuple[int, ...]  # of one image, as the network expects it, for example (3, 224, 224)
    max_batch: int
    max_pixels: int

    def from_body(self, body: Body) -> Decoded:
        """Decode a body by its content type; raises InputError."""
        kind = body.kind.partition(";")[0].strip().lower()
        if kind == "application/json":
            return self._from_json(body)
        if kind == "application/octet-stream":
            return self._batch(_floats(body.content), (body.header or "").split(","), "header X-Shape"), {}
        if kind == "multipart/form-data":
            return self._from_files(self._files(body)), {}
        if kind.startswith("image/"):
            return self._from_files([body.content]), {}
        raise InputError(
            f"Content-Type {kind[:80]!r}: expected multipart/form-data, application/json, "
            "application/octet-stream or image/*"
        )

    def _from_files(self, files: Sequence[bytes]) -> Tensor:
        """Decode image files; the size of each is read from its header first."""
        self._check_count(len(files))
        images = [
            self.transform(decode(data, max_pixels=self.max_pixels, name=f"image {i}", untrusted=True))
            for i, data in enumerate(files)
        ]
        return torch.stack(images)

    def _files(self, body: Body) -> list[bytes]:
        found: list[bytes] = []

        def keep(part: Any) -> None:
            self._check_count(len(found) + 1)
            part.file_object.seek(0)
            found.append(part.file_object.read())

        def refuse(_field: Any) -> None:
            raise InputError("the form has fields that are no files; expected image files only")

        headers: Any = {"Content-Type": body.kind.encode("latin-1", "replace")}
        in_memory: Any = {"MAX_MEMORY_FILE_SIZE": 2**40}
        try:
            parser = create_form_parser(headers, refuse, keep, config=in_memory)
            parser.write(body.content)
            parser.finalize()
        except InputError:
            raise
        except Exception as error:  # the parser has assertions for what it does not expect
            raise InputError(f"body: not a valid form ({type(error).__name__}: {error})") from error
        return found

    def _from_json(self, body: Body) -> Decoded:
        """Read image files, lists of numbers, or a request of the Open Inference Protocol.

        In that protocol the bytes of a binary tensor may follow the JSON, whose length is in the header.
        """
        length = int(body.header) if body.header and body.header.isdecimal() else len(body.content)
        document = self._parse(body.content[:length])
        if not isinstance(document, dict) or len(document.keys() & {"images", "arrays", "inputs"}) != 1:
            raise InputError(
                'body: expected a JSON object with either "images" (base64), "arrays" (nested lists) or "inputs" '
                "(one tensor)"
            )
        if "inputs" in document:
            return self._from_tensor(document, body.content[length:])
        if unknown := sorted(set(document) - {"images", "arrays"}):
            raise InputError(f"body: unknown key {unknown[0][:50]!r}; expected images or arrays only")
        ((key, entries),) = document.items()
        if not isinstance(entries, list):
            raise InputError(f"{key} is {type(entries).__name__}: expected a list with one entry per image")
        self._check_count(len(entries))
        if key == "images":
            return self._from_files([_unbase64(i, entry) for i, entry in enumerate(entries)]), {}
        values = _numbers(entries, "arrays")
        return self._batch(values, values.shape, "arrays"), {}

    def _from_tensor(self, document: dict[str, Any], binary: bytes) -> Decoded:
        try:
            (tensor,) = document["inputs"]
            datatype, sizes, data = tensor["datatype"], tensor["shape"], tensor.get("data")
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise InputError("inputs: expected one tensor with name, datatype, shape and data") from error
        if datatype != "FP32":
            raise InputError(f"datatype {str(datatype)[:20]!r}: expected FP32")
        values = _floats(binary) if data is None else _numbers(data, "data")
        facts = {"id": document["id"]} if isinstance(document.get("id"), str) else {}
        return self._batch(values, sizes, "inputs"), facts

    def _batch(self, values: Floats, sizes: Iterable[Any], what: str) -> Tensor:
        """Return values as images; refuse other shapes and values that are not finite."""
        try:
            shape = tuple(int(size) for size in sizes)
        except (TypeError, ValueError, OverflowError):
            shape = ()
        given, wanted = (",".join(map(str, numbers[:8])) for numbers in (shape, self.shape))
        if shape[1:] != self.shape or shape[0] < 1:
            raise InputError(f"{what}: shape {given or 'missing'}; expected N,{wanted}")
        self._check_count(shape[0])
        if values.size != np.prod(shape):
            raise InputError(f"{values.size} numbers of 4 bytes: shape {given} needs {np.prod(shape)}")
        good = np.isfinite(values).reshape(shape[0], -1).all(axis=1)
        if not good.all():
            raise InputError(f"arrays: non-finite values in images {np.flatnonzero(~good)[:8].tolist()}; remove them")
        return torch.from_numpy(values.reshape(shape))

    def _parse(self, body: bytes) -> Any:
        """Read JSON; lists and numbers are counted before any object is built."""
        channels, height, *_ = *self.shape, 1, 1
        lists = 8 + self.max_batch * (1 + channels * (1 + height))
        numbers = 8 + self.max_batch * int(np.prod(self.shape))
        if body.count(b"[") + body.count(b"{") > lists or body.count(b",") > lists + numbers:
            raise InputError("body: nested too deeply or too many values; send fewer images, or an octet-stream")
        try:
            return json.loads(body, parse_constant=_refuse_constant)
        except (ValueError, RecursionError) as error:
            raise InputError(f"body: not valid JSON ({str(error)[:200]})") from error

    def _check_count(self, count: int) -> None:
        if not 1 <= count <= self.max_batch:
            raise InputError(f"{count} images in one request; expected 1 to {self.max_batch}")


def _floats(content: bytes) -> Floats:
    if len(content) % 4:
        raise InputError(f"body has {len(content)} bytes: expected 4 for each number of the shape (X-Shape)")
    return np.frombuffer(content, dtype="<f4").astype(np.float32)


def _numbers(lists: Any, what: str) -> Floats:
    try:
        values = np.array(lists)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{what}: lists have different lengths; expected one rectangular block of numbers") from error
    if values.dtype.kind not in "fiu":
        raise InputError(f"{what}: expected lists of numbers only")
    with np.errstate(over="ignore"):
        return values.astype(np.float32)


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not a JSON number")


def _unbase64(index: int, text: Any) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (TypeError, ValueError) as error:
        raise InputError(f"image {index}: expected base64 text ({error})") from error


class DecoderPool:
    """A few decoders; one tenant uses all but one of them, so that its images never make others wait for long."""

    def __init__(self, decoder: RequestDecoder, settings: ServeSettings) -> None:
        self._decoder = decoder
        self._workers = [_Worker(decoder, settings) for _ in range(settings.decoders)]
        self._threads = ThreadPoolExecutor(settings.decoders + 1, thread_name_prefix="dpl-serve-decoder")
        self._idle: asyncio.LifoQueue[_Worker] = asyncio.LifoQueue()
        for worker in self._workers:
            self._idle.put_nowait(worker)
        share = max(1, settings.decoders - 1)
        self._turns: defaultdict[str, asyncio.Semaphore] = defaultdict(lambda: asyncio.Semaphore(share))

    def start(self) -> None:
        """Start the processes now, in the background, and not with the first image."""
        for worker in self._workers:
            self._threads.submit(worker.start)

    async def decode(self, tenant: str, body: Body) -> Decoded:
        """Let another process decode a body; raises InputError."""
        loop = asyncio.get_running_loop()
        if body.kind == "application/octet-stream":  # nothing to decode, only to copy
            return await loop.run_in_executor(self._threads, self._decoder.from_body, body)
        async with self._turns[tenant]:
            worker = await self._idle.get()
            answer = self._threads.submit(worker.ask, body)
            answer.add_done_callback(lambda _: loop.call_soon_threadsafe(self._idle.put_nowait, worker))
            try:
                return await asyncio.wrap_future(answer)
            except asyncio.CancelledError:
                if not answer.done():  # else the process may work for somebody else by now
                    worker.kill()
                raise

    def close(self) -> None:
        """End the processes."""
        for worker in self._workers:
            worker.kill()
        self._threads.shutdown()


class _Worker:
    """One process, started when it is first needed and again when it has ended."""

    def __init__(self, decoder: RequestDecoder, settings: ServeSettings) -> None:
        self._decoder, self._seconds, self._memory = decoder, settings.decode_seconds, settings.decode_memory
        self._lock = threading.RLock()
        self._process: Any = None
        self._line: Connection

    def start(self) -> Connection:
        """Start the process, unless it runs; return the line to it."""
        with self._lock:
            if self._process is None or not self._process.is_alive():
                # The server has threads, so it cannot be forked; a small process that has imported everything can.
                context: Any = multiprocessing.get_context("spawn" if sys.platform == "win32" else "forkserver")
                if sys.platform != "win32":
                    context.set_forkserver_preload([__name__])
                self._line, theirs = context.Pipe()
                arguments = (theirs, self._decoder, self._seconds, self._memory)
                process = context.Process(target=_run, args=arguments, daemon=True)
                process.start()
                theirs.close()
                self._process = process
            return self._line

    def ask(self, body: Body) -> Decoded:
        """Let the process decode a body; raises InputError."""
        with self._lock:
            try:
                line = self.start()
                line.send(body)
                head, values = json.loads(line.recv_bytes()), line.recv_bytes()
            except (EOFError, OSError):
                raise InputError(self._why_ended()) from None
        if "error" in head:
            raise InputError(head["error"])
        images = np.frombuffer(values, dtype=np.float32).reshape(-1, *self._decoder.shape)
        return torch.from_numpy(images.copy()), head

    def kill(self) -> None:
        """End the process; the thread that waits for it notices."""
        if self._process is not None:
            self._process.kill()

    def _why_ended(self) -> str:
        if self._process is None:
            return "the images cannot be decoded at present"
        self._process.kill()
        self._process.join()
        if self._process.exitcode == -int(getattr(signal, "SIGPROF", 0)):
            return f"decoding takes more than {self._seconds} s (decode_seconds); send smaller images"
        return "decoding was stopped"


def _run(line: Connection, decoder: RequestDecoder, seconds: float, memory: int) -> None:
    """Decode one body after another, until the server has gone. The answer holds plain bytes and JSON, no objects."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the server
    logging.getLogger("python_multipart").setLevel(logging.ERROR)  # what a stranger sends is no warning
    torch.set_num_threads(1)
    if sys.platform == "linux":
        import resource

        used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        resource.setrlimit(resource.RLIMIT_AS, (used + memory, resource.RLIM_INFINITY))
    with suppress(EOFError, OSError):
        while True:
            body = line.recv()
            _limit_time(seconds)
            head, values = _decoded(decoder, body)
            _limit_time(0)
            line.send_bytes(json.dumps(head).encode())
            line.send_bytes(values)


def _decoded(decoder: RequestDecoder, body: Body) -> tuple[dict[str, Any], Any]:
    try:
        images, facts = decoder.from_body(body)
        return facts, images.contiguous().numpy().reshape(-1).view(np.uint8).data
    except DplError as error:
        reason = str(error)
    except MemoryError:
        reason = "decoding needs too much memory (decode_memory); send fewer or smaller images"
    except Exception as error:  # a library's error for bytes that it did not expect
        reason = f"the body cannot be decoded ({type(error).__name__}: {error})"[:300]
    return {"error": reason}, b""


def _limit_time(seconds: float) -> None:
    if sys.platform != "win32":
        signal.setitimer(signal.ITIMER_PROF, seconds)  # its signal ends the process, also inside a C function
