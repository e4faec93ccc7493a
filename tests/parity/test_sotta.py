"""SoTTA against traces of its authors' code."""

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import dpl
from parity.tiny import largest_state_difference, logits_difference, stream, tiny_network, trace

CASES: dict[str, dict[str, Any]] = {
    "sotta": {"confidence": 0.9},
    "sotta_m16": {"confidence": 0.7, "capacity": 16, "weight_decay": 5e-4},
}


def traced_draws(name: str) -> list[Tensor]:
    """Draws that make the bank remove the traced samples."""
    recorded, held, batches = trace(name), Counter[int](), []
    for labels, added, classes, places in zip(
        *(recorded[f"batch/{key}"] for key in ("pseudo_label", "added", "removed_class", "removed_slot")), strict=True
    ):
        draws = []
        for label, entered, removed, place in zip(labels, added, classes, places, strict=True):
            draw = [0.0, 0.0, 0.0]
            if removed >= 0:
                largest = sorted(c for c in held if held[c] == max(held.values()))
                draw = [0.0, (largest.index(removed) + 0.5) / len(largest), (place + 0.5) / held[removed]]
                held[removed] -= 1
            held[label] += int(entered)
            draws.append(draw)
        batches.append(torch.tensor(draws, dtype=torch.float64).reshape(-1, 3))
    return batches


@pytest.mark.parametrize("name", CASES)
def test_equals_the_trace(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    adaptive, expected = dpl.adapt(tiny_network(), "sotta", update_every=32, **CASES[name]), trace(name)
    method: Any = adaptive.method
    offer, draws, everything = method.offer, iter(traced_draws(name)), torch.cat(stream())
    monkeypatch.setattr(method, "offer", lambda labels, _, classes: offer(labels, next(draws), classes))
    outputs, losses, first = [], [], {}
    for images, stored in zip(stream(), expected["batch/mem_stream_index"], strict=True):
        outputs.append(adaptive(images).numpy())
        losses.append(adaptive.last.loss)
        first = first or {key: value.clone() for key, value in adaptive.model.state_dict().items()}
        in_order = everything[torch.from_numpy(stored[stored >= 0]).long()]
        assert torch.equal(method.stored(method.occupied()), in_order)
    assert logits_difference(name, np.stack(outputs)) < 1e-9
    assert largest_state_difference(name, first) < 1e-9
    np.testing.assert_allclose(losses, expected["loss"][:, 1], rtol=1e-9)
