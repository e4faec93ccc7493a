"""RMT against traces of the RMT library."""

from typing import Any

import numpy as np
import pytest
import torch

import dpl
from parity.tiny import (
    Roll,
    projector_and_model,
    require_same_classes,
    require_the_trace,
    source_batches,
    tiny_network,
    trace,
    with_drawn_projector,
)


def adapted(name: str, dtype: torch.dtype = torch.float64) -> dpl.AdaptiveModel:
    """RMT with the projector that the traced run drew."""
    augment = Roll() if name.endswith("roll") else torch.clone
    source = source_batches(dtype)
    adaptive = dpl.adapt(tiny_network(dtype), "rmt", source=source, warmup_samples=0, augment=augment, lr=1e-3)
    return with_drawn_projector(name, adaptive)


@pytest.mark.parametrize("name", ["rmtlib_rmt", "rmtlib_rmt_roll"])
def test_equals_the_trace(name: str) -> None:
    said = require_the_trace(name, adapted(name), 1e-10, rename=projector_and_model)
    assert np.abs(np.array([step["loss"] for step in said]) - trace(name)["loss"][:, 0]).max() < 1e-10


def test_prototypes_of_the_source_equal_the_trace() -> None:
    method: Any = adapted("rmtlib_rmt").method
    assert np.abs(method.prototypes.numpy() - trace("rmtlib_rmt")["init/prototypes"]).max() < 1e-12


def test_same_classes_in_single_precision() -> None:
    require_same_classes("rmtlib_rmt_roll", adapted("rmtlib_rmt_roll", torch.float32), margin=1e-3, least=0.99)
