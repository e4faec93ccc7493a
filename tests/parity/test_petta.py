"""PeTTA against traces of its authors' code."""

from typing import Any

import numpy as np
import pytest

import dpl
from parity.tiny import Roll, require_the_trace, source_batches, tiny_network, trace, with_unused_buffers

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


@pytest.mark.parametrize("name", CASES)
def test_equals_the_trace(name: str) -> None:
    adaptive, expected = adapted(name), trace(name)
    said = require_the_trace(name, adaptive, 1e-9, rename=our_name, complete=with_unused_buffers)
    np.testing.assert_allclose([step["loss"] for step in said], expected["loss"][:, 0], rtol=1e-9)
    np.testing.assert_allclose([step["divergence"] for step in said], expected["batch/divergence"], atol=1e-9)


def test_statistics_of_the_source_equal_the_trace() -> None:
    state, expected = adapted("petta_official_roll").state_dict(), trace("petta_official_roll")
    np.testing.assert_allclose(state["method.source_mean"], expected["init/source_mean"], atol=1e-10)
    np.testing.assert_allclose(state["method.source_variance"], expected["init/source_var"], atol=1e-10)
