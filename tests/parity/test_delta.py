"""DELTA against traces of its authors' code."""

from typing import Any

import numpy as np
import pytest
from torch import Tensor

import dpl
from parity.tiny import largest_state_difference, logits_difference, stream, tiny_network, trace

CASES: dict[str, dict[str, Any]] = {
    "delta_tent": {"lr": 0.025},
    "delta_entw": {"lr": 0.025, "objective": "weighted", "momentum": 0.5, "norm_momentum": 0.9},
}


def state_of(adaptive: dpl.AdaptiveModel) -> dict[str, Tensor]:
    """The model with the moving averages of its layers in place of their buffers."""
    rule: Any = adaptive.network.norm.rule
    state = {key: value.clone() for key, value in adaptive.model.state_dict().items()}
    for name, layer in adaptive.model.named_modules():
        if columns := adaptive.network.norm.columns.get(layer):
            state[f"{name}.running_mean"] = rule.means[columns].clone()
            state[f"{name}.running_std"] = rule.deviations[columns].clone()
    return state


@pytest.mark.parametrize("name", CASES)
def test_equals_the_trace(name: str) -> None:
    adaptive, expected = dpl.adapt(tiny_network(), "delta", **CASES[name]), trace(name)
    outputs, losses, averages, used, first = [], [], [], [], {}
    for images in stream():
        outputs.append(adaptive(images).numpy())
        losses.append(adaptive.last.loss)
        averages.append(adaptive.method.average.numpy())
        used.append(round(adaptive.last.selected * 32))
        first = first or state_of(adaptive)
    assert logits_difference(name, np.stack(outputs)) < 1e-9
    assert largest_state_difference(name, first) < 1e-9
    np.testing.assert_allclose(losses, expected["loss"][:, 0], rtol=1e-9)
    np.testing.assert_allclose(averages, expected["batch/qhat"], atol=1e-9)
    assert used == expected["batch/n_used"].tolist()
