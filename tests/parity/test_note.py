"""NOTE against traces of its authors' code."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import dpl
from parity.tiny import largest_state_difference, logits_difference, stream, tiny_network, trace

CASES: dict[str, dict[str, Any]] = {
    "note_official": {"weight_decay": 5e-4},
    "note_official_all": {"k": 3.0, "capacity": 384, "update_every": 32, "bn_momentum": 0.1, "lr": 1e-3},
}


def adapted(name: str, monkeypatch: pytest.MonkeyPatch, authors: bool = True) -> dpl.AdaptiveModel:
    """NOTE with the traced draws of the reservoir."""
    adaptive = dpl.adapt(tiny_network(), "note", authors=authors, **CASES[name])
    method: Any = adaptive.method
    offer, draws = method.offer, iter(torch.from_numpy(trace(name)["init/luck"]).split(32))

    def with_traced_draws(labels: Tensor, _: Tensor, classes: int) -> tuple[Tensor, Tensor]:
        return offer(labels, next(draws), classes)

    monkeypatch.setattr(method, "offer", with_traced_draws)
    return adaptive


@pytest.mark.parametrize("name", CASES)
def test_equals_the_trace(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    adaptive, expected, everything = adapted(name, monkeypatch), trace(name), torch.cat(stream())
    method: Any = adaptive.method
    outputs, losses, first = [], [], {}
    for images, stored in zip(stream(), expected["batch/mem_stream_index"], strict=True):
        outputs.append(adaptive(images).numpy())
        losses.append(adaptive.last.loss if adaptive.last.updated else np.nan)
        first = first or {key: value.clone() for key, value in adaptive.model.state_dict().items()}
        in_order = everything[torch.from_numpy(stored[stored >= 0]).long()]
        assert torch.equal(method.stored(method.occupied()), in_order)
    # Theirs counts the batches of its BatchNorm layers; nothing uses the number.
    first |= {key: value + (name == "note_official_all") for key, value in first.items() if "tracked" in key}
    assert logits_difference(name, np.stack(outputs)) < 1e-9
    assert largest_state_difference(name, first) < 1e-9
    np.testing.assert_allclose(losses, expected["loss"][:, 0], rtol=1e-9)


def test_the_plain_entropy_stays_near_the_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without weight decay Adam hardly sees a factor of the loss."""
    adaptive = adapted("note_official_all", monkeypatch, authors=False)
    logits = np.stack([adaptive(images).numpy() for images in stream()[:4]])
    assert 1e-9 < np.abs(logits - trace("note_official_all")["logits"][:4]).max() < 1e-4
