"""RMT against traces of the RMT library."""

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
    run,
    same_classes,
    source_batches,
    stream,
    teacher_and_model,
    tiny_network,
    trace,
)


def adapted(name: str, dtype: torch.dtype = torch.float64) -> dpl.AdaptiveModel:
    """RMT with the projector that the traced run drew."""
    augment = Roll() if name.endswith("roll") else torch.clone
    source = source_batches(dtype)
    adaptive = dpl.adapt(tiny_network(dtype), "rmt", source=source, warmup_samples=0, augment=augment, lr=1e-3)
    drawn = {
        f"method.projector.{key.rpartition('/')[2]}": torch.from_numpy(value).to(dtype)
        for key, value in trace(name).items()
        if key.startswith("init/projector/")
    }
    assert len(drawn) == 4
    adaptive.load_state_dict(adaptive.state_dict() | drawn)
    return adaptive


def our_name(traced: str) -> str:
    return f"method.{traced.replace('/', '.')}" if traced.startswith("projector/") else teacher_and_model(traced)


@pytest.mark.parametrize("name", ["rmtlib_rmt", "rmtlib_rmt_roll"])
def test_equals_the_trace(name: str) -> None:
    adaptive = adapted(name)
    after_first: dict[str, Tensor] = {}
    outputs, losses = [], []
    for images in stream():
        outputs.append(adaptive(images).numpy())
        losses.append(adaptive.last.loss)
        after_first = after_first or adaptive.state_dict()
    assert logits_difference(name, np.stack(outputs)) < 1e-10
    assert np.abs(np.array(losses) - trace(name)["loss"][:, 0]).max() < 1e-10
    assert largest_state_difference(name, after_first, rename=our_name) < 1e-10


def test_prototypes_of_the_source_equal_the_trace() -> None:
    method: Any = adapted("rmtlib_rmt").method
    assert np.abs(method.prototypes.numpy() - trace("rmtlib_rmt")["init/prototypes"]).max() < 1e-12


def test_same_classes_in_single_precision() -> None:
    logits, _ = run(adapted("rmtlib_rmt_roll", torch.float32), stream(torch.float32))
    clear, equal = same_classes(logits, trace("rmtlib_rmt_roll")["logits"], margin=1e-3)
    assert clear > 0.99
    assert equal == 1
