"""One lock: what another thread reads is the state between two batches; and inference mode, copies, types on load."""

import copy
import pickle
import threading
from pathlib import Path

import pytest
import torch

import dpl
from dpl.snapshot import read_snapshot
from nets import images, network

STEPS = 40


def torn(model: dpl.AdaptiveModel, states: list[dict[str, torch.Tensor]]) -> int:
    """Count states that mix steps: Adam counts the steps for each parameter."""
    return sum(len({float(v) for k, v in state.items() if k.endswith("/step")}) > 1 for state in states)


def test_states_read_beside_a_stepping_thread_are_whole(tmp_path: Path) -> None:
    model, states, batch = dpl.adapt(network(), "dpl", confidence=0.1), [], images()
    model(batch)
    done = threading.Event()

    def read() -> None:
        while not done.is_set():
            states.append(model.state_dict())

    def save() -> None:
        number = 0
        while not done.is_set():
            folder = model.save(tmp_path / str(number))
            states.append({k.removeprefix("state."): v for k, v in read_snapshot(folder)[1].items()})
            number += 1

    def predict() -> None:
        while not done.is_set():
            assert model.predict(batch).isfinite().all()

    threads = [threading.Thread(target=target) for target in (read, save, predict)]
    for thread in threads:
        thread.start()
    for _ in range(STEPS):
        model(batch)
    done.set()
    for thread in threads:
        thread.join()
    assert len(states) > 3
    assert torn(model, states) == 0


@pytest.mark.parametrize("guard", [False, True])
def test_everything_works_within_inference_mode(tmp_path: Path, guard: bool) -> None:
    outside = dpl.adapt(network(), "dpl", confidence=0.3, guard=guard)
    expected = [outside(images(8, seed=i)) for i in range(3)]
    with torch.inference_mode():
        inside = dpl.adapt(network(), "dpl", confidence=0.3, guard=guard)
        logits = [inside(images(8, seed=i)) for i in range(2)]
        folder = inside.save(tmp_path / "snapshot")
        inside = dpl.load(folder, network())
        inside.predict(images())
    logits.append(inside(images(8, seed=2)))
    assert all(torch.equal(a, b) for a, b in zip(expected, logits, strict=True))
    with torch.inference_mode():
        inside.reset()
    assert torch.equal(inside(images(8, seed=0)), expected[0])


def test_a_copy_is_made_by_deepcopy_and_a_pickle_is_refused() -> None:
    model = dpl.adapt(network(), "dpl")
    assert torch.equal(copy.deepcopy(model)(images()), model(images()))
    with pytest.raises(TypeError, match="deepcopy"):
        pickle.dumps(model)


@pytest.mark.parametrize("key", ["model.fc.weight", "optimizer.fc.weight/exp_avg", "method.share"])
def test_a_state_of_another_type_is_refused_and_changes_nothing(key: str) -> None:
    model = dpl.adapt(network(), "dpl", confidence=0.1)
    model(images())
    before = model.state_dict()
    wrong = torch.zeros(3) if key == "method.share" else before[key].to(torch.int32)
    with pytest.raises(dpl.SnapshotError):
        model.load_state_dict(before | {key: wrong})
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
