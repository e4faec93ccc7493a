"""ROID against traces of the RMT library."""

from typing import Any

import numpy as np
import pytest
import torch

import dpl
from parity.tiny import Roll, compare, require_same_classes, stream, tiny_network, trace

CASES = ["rmtlib_roid", "rmtlib_roid_nocons", "rmtlib_roid_roll"]


def adapted(name: str, dtype: torch.dtype = torch.float64) -> dpl.AdaptiveModel:
    settings: dict[str, dict[str, Any]] = {
        "rmtlib_roid": {"augment": torch.clone},
        "rmtlib_roid_nocons": {"consistency": False},
        "rmtlib_roid_roll": {"augment": Roll()},
    }
    return dpl.adapt(tiny_network(dtype), "roid", **settings[name])


@pytest.mark.parametrize("name", CASES)
def test_equals_the_trace(name: str) -> None:
    difference = compare(name, adapted(name))
    assert difference["logits"] < 1e-8
    assert difference["state"] < 1e-8


def test_losses_and_average_prediction_equal_the_trace() -> None:
    adaptive, losses, averages = adapted("rmtlib_roid_roll"), [], []
    for images in stream():
        adaptive(images)
        losses.append(adaptive.last.loss)
        averages.append(adaptive.method.average.numpy())
    expected = trace("rmtlib_roid_roll")
    np.testing.assert_allclose(losses, expected["loss"][:, -1], rtol=1e-8)
    assert np.abs(np.array(averages) - expected["batch/class_probs_ema"]).max() < 1e-9


@pytest.mark.parametrize("name", CASES)
def test_same_classes_in_single_precision(name: str) -> None:
    require_same_classes(name, adapted(name, torch.float32), margin=5e-3, least=0.9)
