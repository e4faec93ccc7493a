"""Time contenders in turns within one process, each in its own allocator setting, and keep the best of several."""

import ctypes
import gc
import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import dpl
from dpl.allocator import keep_freed_memory
from dpl.costs import forget_peak, peak_memory
from dpl.surgery.layout import channels_last

Step = Callable[[Tensor], object]
Clock = Callable[[], float]
_TRIM, _MMAP = -1, -3  # parameters of glibc's mallopt
_STEPS = 3  # of each contender in its turn
_LARGEST_ADAPTIVE = 32 << 20  # where glibc's own threshold ends up once large blocks were freed


@dataclass(frozen=True)
class Contender:
    """One way to handle a batch."""

    name: str
    step: Step
    keeps_memory: bool = True  # as the command-line tool does; else the allocator's default


def time_in_turns(contenders: list[Contender], images: Tensor, rounds: int, clock: Clock) -> dict[str, float]:
    """Return the best milliseconds per image of each."""
    best = dict.fromkeys((c.name for c in contenders), float("inf"))
    for contender in contenders:
        contender.step(images)  # what only the first batch does: memories are empty, layouts are chosen
    for _ in range(rounds):
        for contender in contenders:
            set_allocator(contender.keeps_memory)
            for _ in range(_STEPS):  # the first after a change of allocator meet unmapped pages
                start = clock()
                contender.step(images)
                best[contender.name] = min(best[contender.name], clock() - start)
    return {name: seconds * 1e3 / len(images) for name, seconds in best.items()}


def peak_of(contender: Contender, images: Tensor) -> float:
    """Return the megabytes that one step needs beyond what is held before it."""
    set_allocator(keeps_memory=False)
    gc.collect()
    _trim()
    forget_peak()
    before = peak_memory() or 0
    contender.step(images)
    return ((peak_memory() or 0) - before) / 2**20


def set_allocator(keeps_memory: bool) -> None:
    """Keep freed memory, or hand it back as glibc does by itself after a while."""
    if keeps_memory:
        keep_freed_memory()
    elif sys.platform.startswith("linux"):
        library = ctypes.CDLL(None)
        library.mallopt(_MMAP, _LARGEST_ADAPTIVE)
        library.mallopt(_TRIM, 2 * _LARGEST_ADAPTIVE)
        _trim()


def _trim() -> None:
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).malloc_trim(0)


def source_step(net: nn.Module) -> Step:
    """Inference in the faster layout."""
    net = net._apply(channels_last)

    @torch.inference_mode()
    def step(images: Tensor) -> Tensor:
        return net(images)

    return step


def floor_step(net: nn.Module, like: dpl.AdaptiveModel) -> Step:
    """A bare forward, backward and optimizer step that trains what `like` trains, with its kind of statistics."""
    net = net._apply(channels_last)
    net.requires_grad_(False)
    chosen = [p for name, p in net.named_parameters() if name in set(like.trainable)]
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
