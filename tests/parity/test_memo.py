"""MEMO against traces of its authors' code."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import dpl
from parity.tiny import Roll, largest_state_difference, logits_difference, stream, tiny_network, trace

CASES: dict[str, dict[str, Any]] = {"memo": {"views": 4}, "memo_prior16": {"views": 8, "norm": 1 / 17}}
BATCHES = 6  # nothing is carried from image to image, and each takes a step of its own


def rolled(images: Tensor) -> Tensor:
    """Roll the k-th view by the k-th of four offsets."""
    return torch.stack([torch.roll(image, Roll.offsets[k % 4], dims=(1, 2)) for k, image in enumerate(images)])


@pytest.mark.parametrize("name", CASES)
def test_equals_the_trace(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    adaptive = dpl.adapt(tiny_network(), "memo", augment=rolled, **CASES[name])
    weights: Any = adaptive.method.source_weights
    put_back, seen = weights.put_back, list[dict[str, Tensor]]()

    def watched() -> None:
        if len(seen) < 32:  # the trace has the weights that were adapted to the last image of the first batch
            seen.append({key: value.clone() for key, value in adaptive.model.state_dict().items()})
        put_back()

    monkeypatch.setattr(weights, "put_back", watched)
    outputs, losses = [], []
    for images in stream()[:BATCHES]:
        outputs.append(adaptive(images).numpy())
        losses.append(adaptive.last.loss)
    assert logits_difference(name, np.stack(outputs), trace(name)["logits"][:BATCHES]) < 1e-9
    assert largest_state_difference(name, seen[31]) < 1e-9
    np.testing.assert_allclose(losses, trace(name)["loss"][:BATCHES].mean(axis=1), rtol=1e-9)
