"""RPL against traces of the RMT library."""

from typing import Any

import numpy as np
import pytest

import dpl
from parity.tiny import compare, stream, tiny_network, trace

CASES: dict[str, dict[str, Any]] = {"rmtlib_rpl": {}, "rmtlib_rpl_sgd": {"lr": 0.025, "optimizer": "nesterov"}}


@pytest.mark.parametrize("name", CASES)
def test_equals_the_trace(name: str) -> None:
    difference = compare(name, dpl.adapt(tiny_network(), "rpl", **CASES[name]))
    assert difference["logits"] < 1e-9
    assert difference["state"] < 1e-9


def test_losses_equal_the_trace() -> None:
    adaptive, losses = dpl.adapt(tiny_network(), "rpl"), []
    for images in stream():
        adaptive(images)
        losses.append(adaptive.last.loss)
    np.testing.assert_allclose(losses, trace("rmtlib_rpl")["loss"][:, 0], rtol=1e-9)
