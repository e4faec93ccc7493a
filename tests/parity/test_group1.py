"""SHOT, SHOT-IM, CPL, DomainAdaptor, Tent-BN and episodic TENT against traces of their authors' code."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import dpl
from parity.tiny import compare, largest_state_difference, logits_difference, run, stream, tiny_network, trace

TRACK_ADAM = {"lr": 1e-4, "norm": "track"}

CASES: list[tuple[str, str, dict[str, Any]]] = [
    ("t3alib_shot", "shot", {"lr": 5e-4}),
    ("t3alib_shotim", "shot_im", {"lr": 5e-4}),
    ("tsdrepo_pl", "pl", TRACK_ADAM),
    ("tsdrepo_shotim", "shot_im", TRACK_ADAM),
    ("cpl_ce", "cpl", {"lr": 1e-2}),
    ("cpl_poly6", "cpl", {"lr": 1e-2, "epsilon": 6.0}),
    ("cpl_poly6_adam", "cpl", {"lr": 1e-3, "epsilon": 6.0, "optimizer": "adam"}),
    ("domainadaptor_online", "domainadaptor", {"online": True, "authors": True}),
]

EPISODIC: list[tuple[str, dict[str, Any]]] = [
    ("domainadaptor", {"authors": True}),
    ("domainadaptor_em", {"objective": "em", "lr": 1e-2}),
    ("domainadaptor_skd", {"objective": "gem-skd", "lr": 1e-2, "authors": True}),
]


@pytest.mark.parametrize(("name", "method", "settings"), CASES, ids=[case[0] for case in CASES])
def test_equals_the_trace(name: str, method: str, settings: dict[str, Any]) -> None:
    difference = compare(name, dpl.adapt(tiny_network(), method, **settings))
    assert difference["logits"] < 1e-10
    assert difference["state"] < 1e-10


@pytest.mark.parametrize(("name", "settings"), EPISODIC, ids=[case[0] for case in EPISODIC])
def test_domainadaptor_equals_the_trace(name: str, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    adaptive = dpl.adapt(tiny_network(), "domainadaptor", **settings)
    answer, adapted = adaptive.method.answer, []

    def watched(images: Tensor, logits: Tensor) -> Tensor:
        adapted.append(_rectified(adaptive))
        return answer(images, logits)

    monkeypatch.setattr(adaptive.method, "answer", watched)
    logits, _ = run(adaptive, stream())
    assert logits_difference(name, logits) < 1e-10
    assert largest_state_difference(name, adapted[0]) < 1e-10


def _rectified(adaptive: dpl.AdaptiveModel) -> dict[str, Tensor]:
    """The network's state with the offsets of this batch, which the authors write into the parameters."""
    state = {key: value.clone() for key, value in adaptive.model.state_dict().items()}
    offsets = adaptive.network.norm.rule.offsets
    for name, layer in adaptive.model.named_modules():
        if layer in offsets:
            state[f"{name}.weight"] += offsets[layer][0]
            state[f"{name}.bias"] += offsets[layer][1]
    return state


def test_cpl_first_pass_equals_the_trace() -> None:
    """The traced logits are the second pass's; those of the first are traced beside them."""
    adaptive = dpl.adapt(tiny_network(), "cpl", lr=1e-2, epsilon=6.0, output="before")
    logits, _ = run(adaptive, stream())
    assert np.abs(logits - trace("cpl_poly6")["batch/pre_update_logits"]).max() < 1e-10


@pytest.mark.parametrize("name", ["t3alib_shot", "t3alib_shotim", "cpl_ce", "cpl_poly6", "domainadaptor_online"])
def test_losses_equal_the_trace(name: str) -> None:
    method, settings = next((m, s) for n, m, s in CASES if n == name)
    adaptive = dpl.adapt(tiny_network(), method, **settings)
    for images, loss in zip(stream(), trace(name)["loss"][:, 0], strict=True):
        adaptive(images)
        assert adaptive.last.loss == pytest.approx(loss, abs=1e-10)


def test_tent_with_a_reset_before_each_batch() -> None:
    adaptive = dpl.adapt(tiny_network(), "tent", lr=1e-2, steps=2)
    logits, first = [], {}
    for images in stream():
        adaptive.reset()
        logits.append(adaptive(images).numpy())
        first = first or {key: value.clone() for key, value in adaptive.model.state_dict().items()}
    assert logits_difference("tent_official_episodic2", np.stack(logits)) < 1e-10
    assert largest_state_difference("tent_official_episodic2", first) < 1e-10


def test_tent_prebn_equals_the_trace() -> None:
    adaptive = dpl.adapt(tiny_network(), "tent_prebn", lr=5e-3)
    first = [adaptive(stream()[0]).numpy()]
    # The authors' layer keeps a counter of batches that it never counts up.
    state = adaptive.model.state_dict() | adaptive.method.state() | {"prebn.num_batches_tracked": torch.tensor(0)}
    assert largest_state_difference("t3alib_tentprebn", state) < 1e-10
    logits = np.stack(first + [adaptive(images).numpy() for images in stream()[1:]])
    assert logits_difference("t3alib_tentprebn", logits) < 1e-10


SINGLE = [*CASES, *((name, "domainadaptor", settings) for name, settings in EPISODIC)]
SINGLE.append(("t3alib_tentprebn", "tent_prebn", {"lr": 5e-3}))


@pytest.mark.parametrize(("name", "method", "settings"), SINGLE, ids=[case[0] for case in SINGLE])
def test_same_classes_in_single_precision(name: str, method: str, settings: dict[str, Any]) -> None:
    logits, _ = run(dpl.adapt(tiny_network(torch.float32), method, **settings), stream(torch.float32))
    expected = trace(name)["logits"]
    top = np.sort(expected, axis=2)
    clear = top[:, :, -1] - top[:, :, -2] > 5e-3
    assert clear.mean() > 0.98
    assert (logits.argmax(axis=2) == expected.argmax(axis=2))[clear].all()
