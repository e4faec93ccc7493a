"""POEM against traces of its authors' code."""

from typing import Any

import numpy as np
import pytest
import torch

import dpl
from parity.tiny import largest_state_difference, logits_difference, source_batches, stream, tiny_network, trace

CASES: dict[str, dict[str, Any]] = {"poem": {}, "poem_d0": {"first_images": 0, "pace": 0.5}}


@pytest.mark.parametrize("name", CASES)
def test_equals_the_trace(name: str) -> None:
    adaptive, expected = dpl.adapt(tiny_network(), "poem", source=source_batches(), lr=0.1, **CASES[name]), trace(name)
    outputs, losses, bets, wealth, first = [], [], [], [], {}
    for images in stream():
        outputs.append(adaptive(images).numpy())
        losses.append(adaptive.last.loss if adaptive.last.updated else np.nan)
        bets.append(float(adaptive.method.bet))
        wealth.append(float(adaptive.method.log_wealth))
        first = first or {key: value.clone() for key, value in adaptive.model.state_dict().items()}
    assert logits_difference(name, np.stack(outputs)) < 1e-9
    assert largest_state_difference(name, first) < 1e-9
    np.testing.assert_allclose(losses, expected["loss"][:, -1], rtol=1e-9)
    np.testing.assert_allclose(bets, expected["batch/epsilon"][:, -1], atol=1e-9)
    np.testing.assert_allclose(wealth, expected["batch/log_martingale"][:, -1], atol=1e-9)


def test_targets_equal_the_trace() -> None:
    method: Any = dpl.adapt(tiny_network(), "poem", source=source_batches()).method
    expected = trace("poem")
    for before, after in zip(expected["batch/z"], expected["batch/z_after"], strict=True):
        assert np.abs(method.targets(torch.from_numpy(before)).numpy() - after).max() < 1e-9
