"""CoTTA and RoTTA against traces of the benchmark library's code."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import dpl
from dpl.memory.bank import occupied_by_age
from parity.tiny import Roll, largest_state_difference, logits_difference, project, stream, tiny_network, trace

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "rmtlib_cotta_roll": ("cotta", {"momentum": 0.9, "restore": 0.0, "views": 4}),
    "rmtlib_cotta_sym_m90": ("cotta", {"momentum": 0.9, "restore": 0.0, "threshold": 0.1, "loss": "symmetric"}),
    "rmtlib_rotta_roll": ("rotta", {}),
}


def adaptive(name: str, dtype: torch.dtype = torch.float64, **settings: Any) -> dpl.AdaptiveModel:
    method, own = CASES[name]
    return dpl.adapt(tiny_network(dtype), method, augment=Roll(), **own, **settings)


def rename(key: str) -> str:
    """Our name for a traced entry of the student's or the teacher's state."""
    owner, key = ("method.teacher.weights.", key[len("teacher/") :]) if key.startswith("teacher/") else ("model.", key)
    return owner + key.replace("source_mean", "running_mean").replace("source_var", "running_var")


def with_unused_buffers(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The benchmark library's RoTTA has buffers target_mean (zeros) and target_var (ones) that nothing uses."""
    unused = {key.replace("running", "target"): torch.zeros_like(state[key]) for key in state if "running_mean" in key}
    unused |= {key.replace("running", "target"): torch.ones_like(state[key]) for key in state if "running_var" in key}
    return state | unused


@pytest.mark.parametrize("name", CASES)
def test_equals_the_trace(name: str) -> None:
    model = adaptive(name)
    logits = [model(images).numpy() for images in stream()]
    assert logits_difference(name, np.stack(logits)) < 1e-9


@pytest.mark.parametrize("name", CASES)
def test_state_after_the_first_batch(name: str) -> None:
    model = adaptive(name)
    model(stream()[0])
    assert largest_state_difference(name, with_unused_buffers(model.state_dict()), rename=rename) < 1e-9


@pytest.mark.parametrize("name", ["rmtlib_cotta_roll", "rmtlib_cotta_sym_m90"])
def test_losses_and_source_confidence(name: str) -> None:
    model = adaptive(name)
    for i, images in enumerate(stream()[:4]):
        model(images)
        assert model.last.loss == pytest.approx(trace(name)["loss"][i, 0], abs=1e-9)
        assert model.last.source_confidence == pytest.approx(trace(name)["batch/anchor_conf"][i], abs=1e-9)


@pytest.mark.parametrize("together", [1, 64, 100_000])
def test_views_may_run_together_or_alone(together: int) -> None:
    model = adaptive("rmtlib_cotta_roll", views_per_pass=together)
    logits = np.stack([model(images).numpy() for images in stream()[:3]])
    assert np.abs(logits - trace("rmtlib_cotta_roll")["logits"][:3]).max() < 1e-9


def test_rottas_bank_holds_the_same_samples_in_the_same_order() -> None:
    model, expected = adaptive("rmtlib_rotta_roll"), trace("rmtlib_rotta_roll")
    for images in stream():
        model(images)
    bank, everything = model.method, torch.cat(stream())
    order = occupied_by_age(bank.slots)
    assert torch.equal(bank.samples[order], everything[torch.from_numpy(expected["final/mem_stream_index"])])
    assert bank.labels[order].tolist() == expected["final/mem_label"].tolist()
    assert bank.ages[order].tolist() == expected["final/mem_age"].tolist()
    uncertainty = project("mem_uncertainty", bank.uncertainty[order].numpy())
    assert np.abs(uncertainty - expected["final/mem_uncertainty"]).max() < 1e-9


@pytest.mark.parametrize("name", CASES)
def test_float32_predicts_the_same_classes(name: str) -> None:
    model, expected = adaptive(name, torch.float32), trace(name)["logits"]
    logits = np.stack([model(images).numpy() for images in stream(torch.float32)])
    top = np.sort(expected, axis=2)
    clear = top[..., -1] - top[..., -2] > 1e-2
    assert clear.mean() > 0.95
    assert (logits.argmax(2) == expected.argmax(2))[clear].all()
