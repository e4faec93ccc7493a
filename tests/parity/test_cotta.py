"""CoTTA against traces of the RMT library."""

from typing import Any

import numpy as np
import pytest
import torch

import dpl
from parity.tiny import (
    Roll,
    largest_state_difference,
    logits_difference,
    require_same_classes,
    run,
    stream,
    teacher_and_model,
    tiny_network,
    trace,
)

CASES: dict[str, dict[str, Any]] = {
    "rmtlib_cotta_roll": {"views": 4},
    "rmtlib_cotta_sym_m90": {"threshold": 0.1, "loss": "symmetric"},
}


def adapted(name: str, dtype: torch.dtype = torch.float64, **settings: Any) -> dpl.AdaptiveModel:
    return dpl.adapt(tiny_network(dtype), "cotta", augment=Roll(), momentum=0.9, restore=0.0, **CASES[name], **settings)


@pytest.mark.parametrize("name", CASES)
def test_equals_the_trace(name: str) -> None:
    logits, _ = run(adapted(name), stream())
    assert logits_difference(name, logits) < 1e-9


@pytest.mark.parametrize("name", CASES)
def test_state_after_the_first_batch_equals_the_trace(name: str) -> None:
    adaptive = adapted(name)
    adaptive(stream()[0])
    assert largest_state_difference(name, adaptive.state_dict(), rename=teacher_and_model) < 1e-9


@pytest.mark.parametrize("name", CASES)
def test_losses_and_source_confidence_equal_the_trace(name: str) -> None:
    adaptive = adapted(name)
    for i, images in enumerate(stream()[:4]):
        adaptive(images)
        assert adaptive.last.loss == pytest.approx(trace(name)["loss"][i, 0], abs=1e-9)
        assert adaptive.last.source_confidence == pytest.approx(trace(name)["batch/anchor_conf"][i], abs=1e-9)


@pytest.mark.parametrize("together", [1, 64, 100_000])
def test_any_number_of_views_in_one_pass_equals_the_trace(together: int) -> None:
    logits, _ = run(adapted("rmtlib_cotta_roll", views_per_pass=together), stream()[:3])
    assert np.abs(logits - trace("rmtlib_cotta_roll")["logits"][:3]).max() < 1e-9


@pytest.mark.parametrize("name", CASES)
def test_same_classes_in_single_precision(name: str) -> None:
    require_same_classes(name, adapted(name, torch.float32), margin=1e-2, least=0.95)
