"""Source, NORM, PL and TENT against traces of their authors' code."""

from typing import Any

import pytest
from parity.tiny import compare, tiny_network

import dpl

CASES: list[tuple[str, str, dict[str, Any]]] = [
    ("rmtlib_source", "source", {}),
    ("rmtlib_norm_test", "norm", {"authors": True}),
    ("rmtlib_norm_alpha", "norm", {"norm": 0.1}),
    ("rmtlib_norm_ema", "norm", {"ema": True}),
    ("rmtlib_tent_adam", "tent", {}),
    ("rmtlib_tent_sgd", "tent", {"lr": 0.025, "optimizer": "nesterov"}),
    ("t3alib_tentfull", "tent", {}),
    ("t3alib_tentfull_g3", "tent", {"steps": 3}),
    ("t3alib_tentclf", "tent", {"scope": "classifier", "norm": "running", "lr": 5e-3}),
    ("t3alib_pl_g1", "pl", {"lr": 5e-4}),
    ("t3alib_pl_g2", "pl", {"lr": 5e-4, "steps": 2}),
    ("t3alib_pl_empty", "pl", {"lr": 5e-4, "confidence": 0.9965, "authors": True}),
    ("t3alib_plclf", "pl", {"lr": 5e-3, "scope": "classifier"}),
]


@pytest.mark.parametrize(("name", "method", "settings"), CASES, ids=[case[0] for case in CASES])
def test_equals_the_trace(name: str, method: str, settings: dict[str, Any]) -> None:
    difference = compare(
        name, dpl.adapt(tiny_network(), method, **settings), rename=lambda key: key.replace(".layer.", ".")
    )
    assert difference["logits"] < 1e-8
    assert difference["state"] < 1e-8
