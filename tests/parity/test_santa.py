"""SANTA against traces of the RMT library."""

import numpy as np
import pytest
import torch

import dpl
from parity.tiny import (
    Roll,
    projector_and_model,
    require_the_trace,
    source_batches,
    tiny_network,
    trace,
    with_drawn_projector,
)


def adapted(name: str) -> dpl.AdaptiveModel:
    """SANTA with the projector that the traced run drew."""
    augment = Roll() if name.endswith("roll") else torch.clone
    adaptive = dpl.adapt(tiny_network(), "santa", source=source_batches(), augment=augment, projection=32)
    return with_drawn_projector(name, adaptive)


@pytest.mark.parametrize("name", ["rmtlib_santa", "rmtlib_santa_roll"])
def test_equals_the_trace(name: str) -> None:
    said = require_the_trace(name, adapted(name), 1e-9, rename=projector_and_model)
    assert np.abs(np.array([step["loss"] for step in said]) - trace(name)["loss"][:, 0]).max() < 1e-9


def test_prototypes_of_the_source_equal_the_trace() -> None:
    prototypes = adapted("rmtlib_santa").state_dict()["method.prototypes"]
    assert np.abs(prototypes.numpy() - trace("rmtlib_santa")["init/prototypes"]).max() < 1e-12
