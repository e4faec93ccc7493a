"""Time contenders in turns, each in a process of its own, and keep the best of several.

A process of its own, because memory that one contender keeps is a gift to the next: in one process the usual way finds
mapped what ours left, and pays for none of the page faults that it has by itself.
"""

import ctypes
import gc
import json
import math
import multiprocessing
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

import dpl
from dpl.core.allocator import keep_freed_memory
from dpl.network.layout import channels_last
from dpl.runs.costs import forget_peak, peak_memory

Step = Callable[[Tensor], object]
Clock = Callable[[], float]
Facts = dict[str, Any]
CLOCKS: dict[str, Clock] = {"wall": time.perf_counter, "cpu": time.process_time}
_TRIM, _MMAP = -1, -3  # parameters of glibc's mallopt
_LARGEST_ADAPTIVE = 32 << 20  # where glibc's own threshold ends up once large blocks were freed
_STEPS = 2  # of each contender in its turn: the first finds the caches cold,
_LONG = 20.0  # which matters little where one takes so many seconds
_CLOSE = 1.05  # times our time: a difference that may be chance


@dataclass(frozen=True)
class Contender:
    """One way to handle a batch; `build` makes its step, or None where it has no meaning."""

    name: str
    build: Callable[[], Step | None]
    keeps_memory: bool = True  # as the command-line tool does; else the allocator's default


class Runner(Protocol):
    """Takes steps when told."""

    def start(self) -> Facts:
        """Get ready, take a first step; its peak of memory, what is known of the contender, or its `error`."""

    def best(self) -> float:
        """Take the steps of a turn; the seconds of the quickest."""


class Here:
    """Runs a contender in this process, alone or beside others that share the allocator."""

    def __init__(self, contender: Contender, images: Tensor, clock: str, alone: bool) -> None:
        self.contender, self.images, self.clock, self.alone = contender, images, CLOCKS[clock], alone
        self.step: Step | None = None
        self.steps = _STEPS

    def start(self) -> Facts:
        self._set_allocator()
        try:
            self.step = self.contender.build()
        except dpl.DplError as error:
            return {"error": str(error)}
        if self.step is None:
            return {"absent": True}
        facts: Facts = {"peak": round(self.peak(), 1)}  # and what only the first batch does: layouts are chosen
        if isinstance(self.step, dpl.AdaptiveModel):
            return facts | {"layout": self.step.layout, "updated": bool(self.step.last["updated"])}
        return facts

    def best(self) -> float:
        self._set_allocator()
        return min(self._seconds() for _ in range(self.steps))

    def _seconds(self) -> float:
        start = self.clock()
        self._take_step()
        return self.clock() - start

    def _set_allocator(self) -> None:
        if self.contender.keeps_memory:
            keep_freed_memory()
        elif not self.alone:
            hand_memory_back()

    def peak(self) -> float:
        """Return the megabytes that one step needs beyond what is held before it."""
        gc.collect()
        trim()  # what was freed before, here or in the parent, would hide what the step needs
        forget_peak()
        before = peak_memory() or 0
        self.steps = _STEPS if self._seconds() < _LONG else 1
        return ((peak_memory() or 0) - before) / 2**20

    def _take_step(self) -> None:
        if self.step is None:
            raise RuntimeError(f"{self.contender.name} was not started")
        self.step(self.images)


class Apart:
    """Runs a contender in a fork of this process, which must not have used a second thread yet."""

    def __init__(self, contender: Contender, images: Tensor, clock: str, threads: int) -> None:
        fork = multiprocessing.get_context("fork")
        self._pipe, theirs = fork.Pipe()
        self._process = fork.Process(
            target=self._serve, args=(theirs, Here(contender, images, clock, alone=True), threads)
        )
        self._process.start()

    @staticmethod
    def _serve(pipe: Any, runner: Here, threads: int) -> None:
        torch.set_num_threads(threads)
        while question := pipe.recv_bytes().decode():
            pipe.send_bytes(json.dumps(getattr(runner, question)()).encode())

    def _ask(self, question: str) -> Any:
        self._pipe.send_bytes(question.encode())
        return json.loads(self._pipe.recv_bytes())

    def start(self) -> Facts:
        return dict(self._ask("start"))

    def best(self) -> float:
        return float(self._ask("best"))

    def stop(self) -> None:
        self._pipe.send_bytes(b"")
        self._process.join(timeout=10)
        self._process.kill()


@contextmanager
def runners(
    contenders: list[Contender], images: Tensor, clock: str, threads: int, together: bool
) -> Iterator[dict[str, Runner]]:
    """Give each contender a runner: in a process of its own, or all `together` in this one."""
    if together:
        torch.set_num_threads(threads)
        yield {c.name: Here(c, images, clock, alone=False) for c in contenders}
        return
    apart = {c.name: Apart(c, images, clock, threads) for c in contenders}
    try:
        yield dict(apart)
    finally:
        for runner in apart.values():
            runner.stop()


def time_in_turns(found: dict[str, Runner], images: int, rounds: int, patience: float) -> Facts:
    """Return the best milliseconds per image of each runner, its peak, and what is known of `ours`.

    No further round begins after so many seconds of `patience`. Where the usual way seems as fast as ours, as it may
    by chance, both numbers are doubled.
    """
    known = {name: runner.start() for name, runner in found.items()}
    facts = known["ours"]
    if "error" in facts:
        return facts
    present = {name: runner for name, runner in found.items() if not known[name].keys() & {"absent", "error"}}
    begun, done = time.monotonic(), 1
    best = {name: runner.best() for name, runner in present.items()}
    while True:
        more = 2 if best.get("usual", best.get("plain", math.inf)) < _CLOSE * best["ours"] else 1
        if done >= more * rounds or time.monotonic() - begun >= more * patience:
            break
        best = {name: min(best[name], runner.best()) for name, runner in present.items()}
        done += 1
    times = {name: seconds * 1e3 / images for name, seconds in best.items()}
    peaks = {f"peak_{name}": known[name]["peak"] for name in present if name != "floor"}
    return {key: facts[key] for key in ("layout", "updated")} | times | peaks | {"rounds": done}


def hand_memory_back() -> None:
    """Return freed memory now, and from now on as glibc does by itself after a while."""
    if sys.platform.startswith("linux"):
        library = ctypes.CDLL(None)
        library.mallopt(_MMAP, _LARGEST_ADAPTIVE)
        library.mallopt(_TRIM, 2 * _LARGEST_ADAPTIVE)
    trim()


def trim() -> None:
    """Return freed memory now."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).malloc_trim(0)


def source_step(net: nn.Module) -> Step:
    """Inference in the faster layout."""
    net = net._apply(channels_last)

    @torch.inference_mode()
    def step(images: Tensor) -> Tensor:
        return net(images)

    return step


def floor_step(net: nn.Module, like: dpl.AdaptiveModel) -> Step | None:
    """A bare forward, backward and optimizer step that trains what `like` trains, with its kind of statistics."""
    net = net._apply(channels_last)
    net.requires_grad_(False)
    chosen = [p for name, p in net.named_parameters() if name in set(like.trainable)]
    if not chosen:
        return None
    for parameter in chosen:
        parameter.requires_grad_(True)
    if like.settings.norm in ("batch", "track"):
        for layer in net.modules():
            if isinstance(layer, nn.BatchNorm2d):
                layer.train()
                layer.track_running_stats = False
    optimizer = torch.optim.Adam(chosen, lr=1e-8, fused=True)

    def step(images: Tensor) -> None:
        net(images).logsumexp(dim=1).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step
