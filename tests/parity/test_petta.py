"""PeTTA against traces of its authors' code."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import dpl
from parity.tiny import (
    Roll,
    largest_state_difference,
    logits_difference,
    source_batches,
    stream,
    tiny_network,
    trace,
)

CASES: dict[str, dict[str, Any]] = {
    "petta_official_roll": {},
    "petta_official_ce_roll": {"loss": "ce", "reg_weight": 1.0, "momentum": 0.95},
}


def adapted(name: str) -> dpl.AdaptiveModel:
    return dpl.adapt(tiny_network(), "petta", source=source_batches(), augment=Roll(), **CASES[name])


def our_name(traced: str) -> str:
    owner, slash, key = traced.rpartition("/")
    name = f"method.{owner}.weights.{key}" if slash else f"model.{key}"
    return name.replace("source_mean", "running_mean").replace("source_var", "running_var")


def with_unused_buffers(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The authors' layers have buffers target_mean (zeros) and target_var (ones) that nothing uses."""
    unused = {key.replace("running", "target"): torch.zeros_like(state[key]) for key in state if "running_mean" in key}
    unused |= {key.replace("running", "target"): torch.ones_like(state[key]) for key in state if "running_var" in key}
    return state | unused


@pytest.mark.parametrize("name", CASES)
def test_equals_the_trace(name: str) -> None:
    adaptive, expected = adapted(name), trace(name)
    after_first: dict[str, Tensor] = {}
    outputs, losses, divergences = [], [], []
    for images in stream():
        outputs.append(adaptive(images).numpy())
        losses.append(adaptive.last.loss)
        divergences.append(adaptive.last.divergence)
        after_first = after_first or with_unused_buffers(adaptive.state_dict())
    assert logits_difference(name, np.stack(outputs)) < 1e-9
    assert largest_state_difference(name, after_first, rename=our_name) < 1e-9
    np.testing.assert_allclose(losses, expected["loss"][:, 0], rtol=1e-9)
    np.testing.assert_allclose(divergences, expected["batch/divergence"], atol=1e-9)


def test_statistics_of_the_source_equal_the_trace() -> None:
    state, expected = adapted("petta_official_roll").state_dict(), trace("petta_official_roll")
    np.testing.assert_allclose(state["method.source_mean"], expected["init/source_mean"], atol=1e-10)
    np.testing.assert_allclose(state["method.source_variance"], expected["init/source_var"], atol=1e-10)
