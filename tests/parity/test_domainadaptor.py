"""DomainAdaptor against traces of its authors' code."""

from typing import Any

import pytest
import torch
from torch import Tensor

import dpl
from parity.tiny import (
    compare,
    largest_state_difference,
    logits_difference,
    require_same_classes,
    run,
    stream,
    tiny_network,
    trace,
)

ONLINE = {"online": True, "authors": True}
EPISODIC: dict[str, dict[str, Any]] = {
    "domainadaptor": {"authors": True},
    "domainadaptor_em": {"objective": "em", "lr": 1e-2},
    "domainadaptor_skd": {"objective": "gem-skd", "lr": 1e-2, "authors": True},
}


@pytest.mark.parametrize("name", EPISODIC)
def test_episodic_equals_the_trace(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    adaptive = dpl.adapt(tiny_network(), "domainadaptor", **EPISODIC[name])
    answer, adapted = adaptive.method.answer, []

    def watched(images: Tensor, logits: Tensor) -> Tensor:
        adapted.append(rectified(adaptive))
        return answer(images, logits)

    monkeypatch.setattr(adaptive.method, "answer", watched)
    logits, _ = run(adaptive, stream())
    assert logits_difference(name, logits) < 1e-10
    assert largest_state_difference(name, adapted[0]) < 1e-10


def rectified(adaptive: dpl.AdaptiveModel) -> dict[str, Tensor]:
    """The network's state with the offsets of this batch, which the authors write into the parameters."""
    state = {key: value.clone() for key, value in adaptive.model.state_dict().items()}
    offsets = adaptive.network.norm.rule.offsets
    for name, layer in adaptive.model.named_modules():
        if layer in offsets:
            state[f"{name}.weight"] += offsets[layer][0]
            state[f"{name}.bias"] += offsets[layer][1]
    return state


def test_online_equals_the_trace() -> None:
    difference = compare("domainadaptor_online", dpl.adapt(tiny_network(), "domainadaptor", **ONLINE))
    assert difference["logits"] < 1e-10
    assert difference["state"] < 1e-10


def test_online_losses_equal_the_trace() -> None:
    adaptive = dpl.adapt(tiny_network(), "domainadaptor", **ONLINE)
    for images, loss in zip(stream(), trace("domainadaptor_online")["loss"][:, 0], strict=True):
        adaptive(images)
        assert adaptive.last.loss == pytest.approx(loss, abs=1e-10)


ALL = EPISODIC | {"domainadaptor_online": ONLINE}


@pytest.mark.parametrize("name", ALL)
def test_same_classes_in_single_precision(name: str) -> None:
    adaptive = dpl.adapt(tiny_network(torch.float32), "domainadaptor", **ALL[name])
    require_same_classes(name, adaptive, margin=5e-3, least=0.98)
