"""The source model and NORM against traces of the RMT library."""

from typing import Any

import pytest
import torch

import dpl
from parity.tiny import compare, largest_state_difference, logits_difference, run, stream, tiny_network

CASES: list[tuple[str, str, dict[str, Any]]] = [
    ("rmtlib_source", "source", {}),
    ("rmtlib_norm_test", "norm", {"authors": True}),
    ("rmtlib_norm_ema", "norm", {"ema": True}),
]


@pytest.mark.parametrize(("name", "method", "settings"), CASES, ids=[case[0] for case in CASES])
def test_equals_the_trace(name: str, method: str, settings: dict[str, Any]) -> None:
    difference = compare(name, dpl.adapt(tiny_network(), method, **settings))
    assert difference["logits"] < 1e-10
    assert difference["state"] < 1e-10


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
    assert largest_state_difference(name, state, rename=lambda key: key.replace(".layer.", ".")) < 1e-10
    logits, _ = run(dpl.adapt(tiny_network(), "norm", norm=alpha), stream())
    assert logits_difference(name, logits) < 1e-10
