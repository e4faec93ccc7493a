"""ActMAD against traces of its authors' code."""

import numpy as np
import pytest

import dpl
from parity.tiny import (
    largest_state_difference,
    logits_difference,
    source_batches,
    stream,
    tiny_network,
    trace,
)

CASES = {"actmad": 3e-3, "actmad_lr1e-3": 1e-3}


@pytest.mark.parametrize("name", CASES)
def test_equals_the_trace(name: str) -> None:
    adaptive = dpl.adapt(tiny_network(), "actmad", source=source_batches(), lr=CASES[name])
    outputs, losses, first = [], [], {}
    for images in stream():
        outputs.append(adaptive(images).numpy())
        losses.append(adaptive.last.loss)
        first = first or {key: value.clone() for key, value in adaptive.model.state_dict().items()}
    assert logits_difference(name, np.stack(outputs)) < 1e-9
    assert largest_state_difference(name, first) < 1e-9
    np.testing.assert_allclose(losses, trace(name)["loss"][:, 0], rtol=1e-9)


def test_without_a_second_pass_it_returns_the_traced_first_one() -> None:
    name = "actmad_lr1e-3"
    adaptive = dpl.adapt(tiny_network(), "actmad", source=source_batches(), lr=1e-3, output="before")
    logits = np.stack([adaptive(images).numpy() for images in stream()])
    assert np.abs(logits - trace(name)["batch/pre_update_logits"]).max() < 1e-9


def test_statistics_of_the_source_equal_the_trace() -> None:
    """The packed trace has those of the last stage, which come last."""
    state, expected = dpl.adapt(tiny_network(), "actmad", source=source_batches()).state_dict(), trace("actmad_lr1e-3")
    for own, kind in (("mean", "mean"), ("variance", "var")):
        last = np.concatenate([value.ravel() for key, value in expected.items() if key.startswith(f"init/{kind}/")])
        assert len(last) == 3 * 32 * 4
        assert np.abs(state[f"method.source_{own}"][-len(last) :].numpy() - last).max() < 1e-9
