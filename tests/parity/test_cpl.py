"""Conjugate pseudo-labels (CPL) against traces of their authors' code."""

from typing import Any

import numpy as np
import pytest
import torch

import dpl
from parity.tiny import compare, require_same_classes, run, stream, tiny_network, trace

CASES: dict[str, dict[str, Any]] = {
    "cpl_ce": {"lr": 1e-2},
    "cpl_poly6": {"lr": 1e-2, "epsilon": 6.0},
    "cpl_poly6_adam": {"lr": 1e-3, "epsilon": 6.0, "optimizer": "adam"},
}


@pytest.mark.parametrize("name", CASES)
def test_equals_the_trace(name: str) -> None:
    difference = compare(name, dpl.adapt(tiny_network(), "cpl", **CASES[name]))
    assert difference["logits"] < 1e-10
    assert difference["state"] < 1e-10


def test_the_first_pass_equals_the_trace() -> None:
    """The traced logits are those of the second pass; those of the first have an entry of their own."""
    adaptive = dpl.adapt(tiny_network(), "cpl", **CASES["cpl_poly6"], output="before")
    logits, _ = run(adaptive, stream())
    assert np.abs(logits - trace("cpl_poly6")["batch/pre_update_logits"]).max() < 1e-10


@pytest.mark.parametrize("name", ["cpl_ce", "cpl_poly6"])
def test_losses_equal_the_trace(name: str) -> None:
    adaptive = dpl.adapt(tiny_network(), "cpl", **CASES[name])
    for images, loss in zip(stream(), trace(name)["loss"][:, 0], strict=True):
        adaptive(images)
        assert adaptive.last.loss == pytest.approx(loss, abs=1e-10)


@pytest.mark.parametrize("name", CASES)
def test_same_classes_in_single_precision(name: str) -> None:
    require_same_classes(name, dpl.adapt(tiny_network(torch.float32), "cpl", **CASES[name]), margin=5e-3, least=0.98)
