"""Resuming, resetting and running for long, with the guard on."""

import copy
import gc
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import dpl
from abuse.streams import iid, network, one_class
from abuse.subjects import adapted, methods, run
from dpl.snapshot import SnapshotStore
from parity.tiny import source_images


def same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[key], second[key]) for key in first)


def stream() -> list[torch.Tensor]:
    """Trouble first, so that the guard has something to remember."""
    return [images for images, _ in one_class("noise", 16 * 4, size=16) + iid("noise", 16 * 8, size=16)]


@pytest.mark.parametrize("name", methods())
def test_resuming_is_as_if_never_stopped(name: str, tmp_path: Path) -> None:
    model, batches = adapted(name), stream()
    answers = []
    for i, batch in enumerate(batches):
        if i in (2, 7):
            model.save(tmp_path / str(i))
        answers.append(model(batch))
    images, labels = source_images(torch.float32)
    needed = dpl.methods.registry.get_method(name).info.source == "always"
    source = [(images[:64], labels[:64])] if needed else None
    for cut in (2, 7):
        resumed = dpl.load(tmp_path / str(cut), network(), source=model._source if needed else source)
        for batch, expected in zip(batches[cut:], answers[cut:], strict=True):
            assert torch.equal(resumed(batch), expected)


RESUME = """
import sys, torch
sys.path.insert(0, sys.argv[1])
torch.set_num_threads(1)
import dpl
from abuse.streams import network
from abuse.test_abuse_state import stream
from safetensors.torch import save_file
model = dpl.load(sys.argv[2], network())
save_file({str(i): model(batch) for i, batch in enumerate(stream()[6:])}, sys.argv[3])
"""


def test_resuming_in_a_new_process_is_as_if_never_stopped(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    model, batches = adapted("dpl"), stream()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for batch in batches[:6]:
            model(batch)
        model.save(tmp_path / "cut")
        answers = [model(batch) for batch in batches[6:]]
    finally:
        torch.set_num_threads(threads)
    tests = str(Path(__file__).parents[1])
    arguments = [sys.executable, "-c", RESUME, tests, str(tmp_path / "cut"), str(tmp_path / "answers")]
    subprocess.run(arguments, check=True, timeout=240)
    resumed = load_file(tmp_path / "answers")
    assert all(torch.equal(resumed[str(i)], answer) for i, answer in enumerate(answers))


@pytest.mark.parametrize("name", methods())
def test_reset_is_exact_whatever_the_guard_went_through(name: str) -> None:
    model = adapted(name)
    before, hooks = model.state_dict(), sum(len(m._forward_pre_hooks) for m in model.model.modules())
    random, shipped = torch.get_rng_state(), copy.deepcopy(network().state_dict())
    first = model(stream()[0])
    for batch in stream()[1:6]:
        model(batch)
    model.reset()
    assert same(before, model.state_dict())
    assert torch.equal(model(stream()[0]), first)
    assert torch.equal(torch.get_rng_state(), random)
    assert sum(len(m._forward_pre_hooks) for m in model.model.modules()) == hooks
    assert same(shipped, dict(network().state_dict()))


ACTIONS = st.lists(st.sampled_from(["adapt", "bad batch", "snapshot", "roll back", "reset"]), min_size=3, max_size=12)


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(actions=ACTIONS)
def test_any_order_of_actions_agrees_with_replaying_the_batches(tmp_path: Path, actions: list[str]) -> None:
    """The reference: a fresh model that is fed the batches which lead to the present state, and nothing else."""
    model, batches = adapted("tent"), stream()
    history: list[int] = []
    kept: tuple[list[int], Path] | None = None
    for i, action in enumerate(actions):
        if action == "adapt":
            model(batches[i % len(batches)])
            history.append(i % len(batches))
        elif action == "bad batch":
            model(torch.full((2, 3, 16, 16), torch.nan))
        elif action == "snapshot":
            kept = list(history), model.save(tmp_path / "kept")
        elif action == "roll back" and kept is not None:
            history = list(kept[0])
            model = dpl.load(kept[1], network())
        elif action == "reset":
            model.reset()
            history = []
    reference = adapted("tent")
    for number in history:
        reference(batches[number])
    assert torch.equal(model(batches[0]), reference(batches[0]))


def resident_kilobytes() -> int:
    fields = Path("/proc/self/statm").read_text().split()
    return int(fields[1]) * os.sysconf("SC_PAGE_SIZE") // 1024


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads the memory in use from /proc")
def test_a_long_run_grows_nothing(tmp_path: Path) -> None:
    model, store, batches = adapted("tent"), SnapshotStore(tmp_path, keep=2), iid("noise", 8 * 20, size=8)
    for _ in range(2):
        run(model, batches)
        store.save(model)
    gc.collect()
    memory, files, threads = resident_kilobytes(), len(os.listdir("/proc/self/fd")), threading.active_count()
    for _ in range(10):
        run(model, batches)
        store.save(model)
    gc.collect()
    assert resident_kilobytes() - memory < 5_000
    assert len(os.listdir("/proc/self/fd")) == files
    assert threading.active_count() == threads
    assert len(store.all()) == 2
