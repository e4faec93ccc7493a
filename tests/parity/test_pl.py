"""Pseudo-labels (PL) against traces of the T3A and TSD libraries."""

from typing import Any

import pytest
import torch

import dpl
from parity.tiny import compare, require_same_classes, tiny_network

CASES: dict[str, dict[str, Any]] = {
    "t3alib_pl_g1": {"lr": 5e-4},
    "t3alib_pl_g2": {"lr": 5e-4, "steps": 2},
    "t3alib_pl_empty": {"lr": 5e-4, "confidence": 0.9965, "authors": True},
    "t3alib_plclf": {"lr": 5e-3, "scope": "classifier"},
    "tsdrepo_pl": {"lr": 1e-4, "norm": "track"},
}


@pytest.mark.parametrize("name", CASES)
def test_equals_the_trace(name: str) -> None:
    difference = compare(name, dpl.adapt(tiny_network(), "pl", **CASES[name]))
    assert difference["logits"] < 1e-10
    assert difference["state"] < 1e-10


@pytest.mark.parametrize("name", CASES)
def test_same_classes_in_single_precision(name: str) -> None:
    require_same_classes(name, dpl.adapt(tiny_network(torch.float32), "pl", **CASES[name]), margin=5e-3, least=0.98)
