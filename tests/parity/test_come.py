"""COME, and TENT, EATA and SAR with its loss, against traces of its authors' code."""

import math
from typing import Any

import numpy as np
import pytest
import torch

import dpl
from dpl.objectives import opinion_entropy
from parity.tiny import compare, source_batches, stream, tiny_network, trace

LN10 = math.log(10)
COME = {"objective": "come", "opinion_mass": 1000.0}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "come_tent": ("tent", {**COME, "optimizer": "sgd", "lr": 0.1}),
    "come_tent_k10": ("come", {"optimizer": "sgd", "lr": 0.025}),
    "come_eata": (
        "eata",
        {
            **COME,
            "optimizer": "sgd",
            "lr": 0.025,
            "margin": 0.45 / LN10,
            "fisher_weight": 2000.0,
            "fisher_samples": 128,
        },
    ),
    "come_sar": ("sar", {**COME, "lr": 0.02, "margin": 0.55 / LN10, "authors": "official"}),
}


def adapted(name: str) -> dpl.AdaptiveModel:
    method, settings = CASES[name]
    return dpl.adapt(tiny_network(), method, source=source_batches() if method == "eata" else None, **settings)


@pytest.mark.parametrize("name", CASES)
def test_equals_the_trace(name: str) -> None:
    difference = compare(name, adapted(name))
    assert difference["logits"] < 1e-9
    assert difference["state"] < 1e-9


@pytest.mark.parametrize("name", CASES)
def test_losses_equal_the_trace(name: str) -> None:
    adaptive, losses = adapted(name), []
    for images in stream():
        adaptive(images)
        losses.append(adaptive.last.loss)
    np.testing.assert_allclose(losses, trace(name)["loss"][:, -1], rtol=1e-9)


def test_the_uncertainty_equals_the_trace() -> None:
    expected = trace("come_tent")
    own = opinion_entropy(torch.from_numpy(expected["logits"].reshape(-1, 10)), 1000.0)
    assert np.abs(own.numpy() - expected["batch/opinion_entropy"].ravel()).max() < 1e-12


def test_the_selection_of_eata_equals_the_trace() -> None:
    adaptive, seen = adapted("come_eata"), []
    for images in stream():
        adaptive(images)
        seen.append((round(adaptive.last.reliable * 32), round(adaptive.last.selected * 32)))
    expected = trace("come_eata")
    assert np.array_equal(np.cumsum(seen, axis=0).T, [expected["batch/n_reliable"], expected["batch/n_selected"]])
