"""CMF against traces of the RMT library."""

from typing import Any

import numpy as np
import pytest
from torch import Tensor

import dpl
from parity.tiny import Roll, largest_state_difference, logits_difference, stream, tiny_network, trace

CASES: dict[str, dict[str, Any]] = {
    "rmtlib_cmf_roll": {},
    "rmtlib_cmf_q4_roll": {"alpha": 0.95, "weight_momentum": 0.9, "process_noise": 4.0},
}


def hidden_weights(method: Any) -> dict[str, Tensor]:
    """The filtered model by its traced names; what does not train is the source's."""
    source = method.source_weights.named()
    frozen = {f"hidden/{name}": value for name, value in method.network.module.state_dict().items()}
    parts = method.hidden.split([value.numel() for value in source.values()])
    return frozen | {
        f"hidden/{name}": value + part.view_as(value) for (name, value), part in zip(source.items(), parts, strict=True)
    }


@pytest.mark.parametrize("name", CASES)
def test_equals_the_trace(name: str) -> None:
    adaptive = dpl.adapt(tiny_network(), "cmf", augment=Roll(), **CASES[name])
    after_first: dict[str, Tensor] = {}
    logits, losses, averages, variances = [], [], [], []
    for images in stream():
        logits.append(adaptive(images).numpy())
        losses.append(adaptive.last.loss)
        averages.append(adaptive.method.average.numpy())
        variances.append(adaptive.method.variance)
        after_first = after_first or adaptive.state.copy() | hidden_weights(adaptive.method)
    assert logits_difference(name, np.stack(logits)) < 1e-9
    after_first |= {key.removeprefix("model."): value for key, value in after_first.items()}
    assert largest_state_difference(name, after_first) < 1e-9
    expected = trace(name)
    np.testing.assert_allclose(losses, expected["loss"][:, -1], rtol=1e-9)
    np.testing.assert_allclose(averages, expected["batch/class_probs_ema"], atol=1e-9)
    np.testing.assert_allclose(variances, expected["batch/hidden_var"], rtol=1e-9)
