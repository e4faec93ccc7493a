"""Processes that decode the bodies of requests, each with a limit of processor time and memory.

A body that exceeds a limit ends its process, which is replaced; so does a client that leaves. Nothing else is lost.
"""

import asyncio
import json
import logging
import multiprocessing
import os
import signal
import sys
import threading
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dpl.core.errors import DplError, InputError
from dpl.serve.images import Body, RequestDecoder
from dpl.serve.settings import ServeSettings

__all__ = ["DecoderPool"]


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

    async def decode(self, tenant: str, body: Body) -> tuple[Tensor, dict[str, Any]]:
        """Return the images of a body, and facts that it has about itself; raises InputError."""
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
        self._lock = threading.Lock()
        self._process: Any = None

    def start(self) -> None:
        """Start the process, unless it runs."""
        with self._lock:
            self._started()

    def _started(self) -> Connection:
        if self._process is None or not self._process.is_alive():
            # The server has threads, so it cannot be forked; a small process that has imported everything can.
            context: Any = multiprocessing.get_context("spawn" if sys.platform == "win32" else "forkserver")
            if sys.platform != "win32":
                context.set_forkserver_preload(["dpl.serve.decoders"])
            self._line: Connection
            self._line, theirs = context.Pipe()
            arguments = (theirs, self._decoder, self._seconds, self._memory)
            process = context.Process(target=_run, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self._process = process
        return self._line

    def ask(self, body: Body) -> tuple[Tensor, dict[str, Any]]:
        """Let the process decode a body; return the images and what it says, or raise InputError."""
        with self._lock:
            try:
                line = self._started()
                line.send_bytes(json.dumps([body.kind, body.shape]).encode())
                line.send_bytes(body.content)
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
    _limit_memory(memory)
    with suppress(EOFError, OSError):
        while True:
            kind, shape = json.loads(line.recv_bytes())
            content = line.recv_bytes()
            _limit_time(seconds)
            head, values = _decoded(decoder, Body(kind, content, shape))
            _limit_time(0)
            line.send_bytes(json.dumps(head).encode())
            line.send_bytes(values)


def _decoded(decoder: RequestDecoder, body: Body) -> tuple[dict[str, Any], Any]:
    try:
        images, facts = decoder.from_body(body)
        return facts, images.contiguous().numpy().reshape(-1).view(np.uint8).data
    except DplError as error:
        return {"error": str(error)}, b""
    except MemoryError:
        return {"error": "decoding needs too much memory (decode_memory); send fewer or smaller images"}, b""
    except Exception as error:  # a library's error for bytes that it did not expect
        return {"error": f"the body cannot be decoded ({type(error).__name__}: {error})"[:300]}, b""


def _limit_time(seconds: float) -> None:
    if sys.platform != "win32":
        signal.setitimer(signal.ITIMER_PROF, seconds)  # its signal ends the process, also inside a C function


def _limit_memory(size: int) -> None:
    if sys.platform == "linux":
        import resource

        used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        resource.setrlimit(resource.RLIMIT_AS, (used + size, resource.RLIM_INFINITY))
