"""SAR against traces of its authors' code and of the RMT library."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import dpl
from parity.tiny import clean_test_images, compare, run, same_classes, stream, tiny_network, trace

CASES: dict[str, dict[str, Any]] = {
    "rmtlib_sar": {},
    "rmtlib_sar_lr2e-2": {"lr": 0.02},
    "rmtlib_sar_mixed": {"lr": 0.02, "authors": "rmt"},
    "sar_official_mixed": {"lr": 0.02, "authors": "official"},
}


def adapted(name: str, dtype: torch.dtype = torch.float64) -> dpl.AdaptiveModel:
    return dpl.adapt(tiny_network(dtype), "sar", **CASES[name])


def batches_of(name: str, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """The traced stream: in the mixed ones three clean batches come first."""
    plain = stream(dtype)
    return [*clean_test_images(dtype).split(32), *plain[:9]] if name.endswith("mixed") else plain


@pytest.mark.parametrize("name", CASES)
def test_equals_the_trace(name: str) -> None:
    difference = compare(name, adapted(name), batches_of(name))
    assert difference["logits"] < 1e-8
    assert difference["state"] < 1e-8


@pytest.mark.parametrize("name", ["rmtlib_sar", "rmtlib_sar_mixed", "sar_official_mixed"])
def test_average_loss_equals_the_trace(name: str) -> None:
    adaptive, seen = adapted(name), []
    for images in batches_of(name):
        adaptive(images)
        average = adaptive.method.average
        seen.append(np.nan if average is None else float(average))
    np.testing.assert_allclose(seen, trace(name)["batch/ema"], rtol=0, atol=1e-9)


def test_losses_equal_the_trace() -> None:
    adaptive, losses = adapted("rmtlib_sar_lr2e-2"), []
    for images in stream():
        adaptive(images)
        losses.append(adaptive.last.loss)
    np.testing.assert_allclose(losses, trace("rmtlib_sar_lr2e-2")["loss"][:, -1], rtol=1e-8)


@pytest.mark.parametrize("name", CASES)
def test_same_classes_in_single_precision(name: str) -> None:
    logits, _ = run(adapted(name, torch.float32), batches_of(name, torch.float32))
    clear, equal = same_classes(logits, trace(name)["logits"], margin=5e-3)
    assert clear > 0.9
    assert equal == 1
