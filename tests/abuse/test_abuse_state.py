"""Resuming, resetting and running for long, with the guard on."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import dpl
from abuse.endurance import resetting_is_exact, resuming_is_exact, soak
from abuse.streams import iid, network, one_class
from abuse.subjects import adapted
from dpl.methods import list_methods


def stream() -> list[torch.Tensor]:
    """Trouble first, so that the guard has something to remember."""
    return [images for images, _ in one_class("noise", 16 * 4, size=16) + iid("noise", 16 * 8, size=16)]


@pytest.mark.parametrize("name", list_methods())
def test_resuming_is_as_if_never_stopped(name: str, tmp_path: Path) -> None:
    resuming_is_exact(name, tmp_path, stream()[:9], cuts=(5,))


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


@pytest.mark.parametrize("name", list_methods())
def test_reset_is_exact_whatever_the_guard_went_through(name: str) -> None:
    resetting_is_exact(name, stream()[:5])


ACTIONS = st.lists(st.sampled_from(["adapt", "bad batch", "snapshot", "roll back", "reset"]), min_size=3, max_size=12)


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
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


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads the memory in use from /proc")
def test_a_long_run_grows_nothing(tmp_path: Path) -> None:
    grown = soak(tmp_path, batches=120, warm=40)
    assert grown["megabytes"] < 5
    assert grown["files"] == grown["threads"] == 0
    assert grown["snapshots"] == 2
