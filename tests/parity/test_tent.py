"""TENT and Tent-BN against traces of their authors' code, of the RMT library and of the T3A library."""

from typing import Any

import numpy as np
import pytest
import torch

import dpl
from parity.tiny import (
    compare,
    largest_state_difference,
    logits_difference,
    require_same_classes,
    stream,
    tiny_network,
)

CASES: dict[str, dict[str, Any]] = {
    "rmtlib_tent_adam": {},
    "rmtlib_tent_sgd": {"lr": 0.025, "optimizer": "nesterov"},
    "t3alib_tentfull": {},
    "t3alib_tentfull_g3": {"steps": 3},
    "t3alib_tentclf": {"scope": "classifier", "norm": "running", "lr": 5e-3},
}


@pytest.mark.parametrize("name", CASES)
def test_equals_the_trace(name: str) -> None:
    difference = compare(name, dpl.adapt(tiny_network(), "tent", **CASES[name]))
    assert difference["logits"] < 1e-10
    assert difference["state"] < 1e-10


def test_with_a_reset_before_each_batch_it_equals_the_trace() -> None:
    adaptive = dpl.adapt(tiny_network(), "tent", lr=1e-2, steps=2)
    logits, first = [], {}
    for images in stream():
        adaptive.reset()
        logits.append(adaptive(images).numpy())
        first = first or {key: value.clone() for key, value in adaptive.model.state_dict().items()}
    assert logits_difference("tent_official_episodic2", np.stack(logits)) < 1e-10
    assert largest_state_difference("tent_official_episodic2", first) < 1e-10


def test_tent_prebn_equals_the_trace() -> None:
    adaptive = dpl.adapt(tiny_network(), "tent_prebn", lr=5e-3)
    first = [adaptive(stream()[0]).numpy()]
    # The authors' layer keeps a counter of batches that it never counts up.
    state = adaptive.model.state_dict() | adaptive.method.state() | {"prebn.num_batches_tracked": torch.tensor(0)}
    assert largest_state_difference("t3alib_tentprebn", state) < 1e-10
    logits = np.stack(first + [adaptive(images).numpy() for images in stream()[1:]])
    assert logits_difference("t3alib_tentprebn", logits) < 1e-10


def test_tent_prebn_predicts_the_same_classes_in_single_precision() -> None:
    adaptive = dpl.adapt(tiny_network(torch.float32), "tent_prebn", lr=5e-3)
    require_same_classes("t3alib_tentprebn", adaptive, margin=5e-3, least=0.98)
