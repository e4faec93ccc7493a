"""Source, NORM, PL and TENT against traces of their authors' code."""

from typing import Any

import pytest
import torch

import dpl
from parity.tiny import compare, largest_state_difference, logits_difference, run, stream, tiny_network

CASES: list[tuple[str, str, dict[str, Any]]] = [
    ("rmtlib_source", "source", {}),
    ("rmtlib_norm_test", "norm", {"authors": True}),
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


def test_blended_statistics_equal_the_trace() -> None:
    """The library keeps the batch's own statistics in buffers (`<layer>.norm`); here they follow from the blend."""
    alpha = 0.1
    adaptive = dpl.adapt(tiny_network(), "norm", norm=alpha)
    with adaptive.network.norm.recording() as blended:
        adaptive(stream()[0])
    state = adaptive.model.state_dict()
    for name, layer in adaptive.model.named_modules():
        if layer in blended:
            for entry, value in zip(("running_mean", "running_var"), blended[layer], strict=True):
                source = state[f"{name}.{entry}"]
                state[f"{name}.norm.{entry}"] = source + (value - source) / alpha
            state[f"{name}.norm.num_batches_tracked"] = torch.tensor(1)
    name = "rmtlib_norm_alpha"
    assert largest_state_difference(name, state, rename=lambda key: key.replace(".layer.", ".")) < 1e-8
    logits, _ = run(dpl.adapt(tiny_network(), "norm", norm=alpha), stream())
    assert logits_difference(name, logits) < 1e-8
