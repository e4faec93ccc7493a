"""SANTA against traces of the RMT library."""

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


def adapted(name: str) -> dpl.AdaptiveModel:
    """SANTA with the projector that the traced run drew."""
    augment = Roll() if name.endswith("roll") else torch.clone
    adaptive = dpl.adapt(tiny_network(), "santa", source=source_batches(), augment=augment, projection=32)
    drawn = {
        f"method.projector.{key.rpartition('/')[2]}": torch.from_numpy(value)
        for key, value in trace(name).items()
        if key.startswith("init/projector/")
    }
    assert len(drawn) == 4
    adaptive.load_state_dict(adaptive.state_dict() | drawn)
    return adaptive


def our_name(traced: str) -> str:
    return f"method.{traced.replace('/', '.')}" if traced.startswith("projector/") else f"model.{traced}"


@pytest.mark.parametrize("name", ["rmtlib_santa", "rmtlib_santa_roll"])
def test_equals_the_trace(name: str) -> None:
    adaptive = adapted(name)
    after_first: dict[str, Tensor] = {}
    outputs, losses = [], []
    for images in stream():
        outputs.append(adaptive(images).numpy())
        losses.append(adaptive.last.loss)
        after_first = after_first or adaptive.state_dict()
    assert logits_difference(name, np.stack(outputs)) < 1e-9
    assert np.abs(np.array(losses) - trace(name)["loss"][:, 0]).max() < 1e-9
    assert largest_state_difference(name, after_first, rename=our_name) < 1e-9


def test_prototypes_of_the_source_equal_the_trace() -> None:
    prototypes = adapted("rmtlib_santa").state_dict()["method.prototypes"]
    assert np.abs(prototypes.numpy() - trace("rmtlib_santa")["init/prototypes"]).max() < 1e-12
