"""Promises about state, as functions of a method: bad rows leave no trace, resuming and resetting are exact, nothing
grows. Each raises AssertionError where a promise is broken."""

import copy
import gc
import os
import statistics
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

import dpl
from abuse.streams import iid
from abuse.subjects import adapted, network_for, source_of
from dpl.methods import get_method
from dpl.snapshot import SnapshotStore

BAD_ROWS = (0, 5, 11, 31)


def spoil(images: Tensor) -> tuple[Tensor, list[int]]:
    """Put one image of each bad kind into a batch of 32; return it and the rows that stayed good."""
    images = images.clone()
    images[0, 0, 0, 0], images[5, 1] = torch.nan, torch.inf
    images[11, 2, 3, 3], images[31] = -torch.inf, 1e20
    return images, [row for row in range(len(images)) if row not in BAD_ROWS]


def bad_rows_leave_no_trace(name: str, after: int = 10) -> None:
    """A model that met bad rows goes on as its twin that met the same batch without them, to the bit."""
    model, twin = adapted(name), adapted(name)
    batches = [images for images, _ in iid("noise", 32 * (after + 2))]
    assert torch.equal(model(batches[0]), twin(batches[0]))
    spoilt, good = spoil(batches[1])
    logits = model(spoilt)
    assert torch.equal(logits[good], twin(spoilt[good]))
    assert tuple(sorted(model.last["set_aside"])) == BAD_ROWS
    assert not logits[list(BAD_ROWS)].any()
    for batch in batches[2:]:
        assert torch.equal(model(batch), twin(batch))
    floats = [value for value in model.state_dict().values() if value.is_floating_point()]
    assert all(torch.isfinite(value).all() for value in floats)


def resuming_is_exact(name: str, folder: Path, batches: Sequence[Tensor], cuts: Sequence[int]) -> None:
    """Every answer after a snapshot is that of a model which was never stopped, to the bit."""
    model, answers = adapted(name), []
    for i, batch in enumerate(batches):
        if i in cuts:
            model.save(folder / str(i))
        answers.append(model(batch))
    source = source_of(name) if get_method(name).info.source == "always" else None
    for cut in cuts:
        resumed = dpl.load(folder / str(cut), network_for(name), source=source)
        for batch, expected in zip(batches[cut:], answers[cut:], strict=True):
            assert torch.equal(resumed(batch), expected), f"differs after a cut at batch {cut}"


def resetting_is_exact(name: str, batches: Sequence[Tensor]) -> None:
    """A reset brings back every bit; hooks, random numbers and the caller's network are as before."""
    network = network_for(name)
    model, shipped = adapted(name), copy.deepcopy(network.state_dict())
    before, hooks, random = model.state_dict(), _hooks(model), torch.get_rng_state()
    first = model(batches[0])
    for batch in batches[1:]:
        model(batch)
    model.reset()
    assert same(before, model.state_dict())
    assert torch.equal(model(batches[0]), first)
    assert torch.equal(torch.get_rng_state(), random)
    assert _hooks(model) == hooks
    assert same(shipped, dict(network.state_dict()))


def same(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[key], second[key]) for key in first)


def _hooks(model: dpl.AdaptiveModel) -> int:
    return sum(len(module._forward_pre_hooks) + len(module._forward_hooks) for module in model.model.modules())


def soak(folder: Path, batches: int, warm: int) -> dict[str, float]:
    """Adapt and save for long; return what grew since the first `warm` batches."""
    model, store = adapted("tent"), SnapshotStore(folder, keep=2)
    pool, times = iid("noise", 8 * 20, size=8), []
    memory = files = threads = 0
    for i in range(batches):
        if i == warm:
            memory, files, threads = _resident(), len(os.listdir("/proc/self/fd")), threading.active_count()
        start = time.process_time()
        model(pool[i % len(pool)][0])
        times.append(time.process_time() - start)
        if i % 20 == 0:
            store.save(model)
    first, last = sorted(times[:warm]), sorted(times[-warm:])
    return {
        "batches": batches,
        "megabytes": (_resident() - memory) / 2**20,
        "files": len(os.listdir("/proc/self/fd")) - files,
        "threads": threading.active_count() - threads,
        "snapshots": len(store.all()),
        "median_time": statistics.median(last) / statistics.median(first),
        "p99_time": last[int(0.99 * (warm - 1))] / first[int(0.99 * (warm - 1))],
    }


def _resident() -> int:
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
