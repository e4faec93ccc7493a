"""ETA and EATA against traces of their authors' code and of the RMT library."""

from typing import Any

import numpy as np
import pytest
import torch

import dpl
from parity.tiny import compare, require_same_classes, source_batches, stream, tiny_network, trace

SGD = {"lr": 0.025, "optimizer": "sgd"}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "rmtlib_eta": ("eta", {}),
    "rmtlib_eta_sgd": ("eta", {"lr": 0.025, "optimizer": "nesterov"}),
    "eata_official_eta": ("eta", SGD),
    "eata_official_eta_d005": ("eta", {**SGD, "max_similarity": 0.05}),
    "rmtlib_eata": ("eata", {"fisher_weight": 2000.0, "fisher_samples": 128}),
    "rmtlib_eata_f2e5": ("eata", {"fisher_weight": 2e5, "fisher_samples": 128}),
}


def adapted(name: str, dtype: torch.dtype = torch.float64) -> dpl.AdaptiveModel:
    method, settings = CASES[name]
    source = source_batches(dtype) if method == "eata" else None
    return dpl.adapt(tiny_network(dtype), method, source=source, **settings)


@pytest.mark.parametrize("name", CASES)
def test_equals_the_trace(name: str) -> None:
    difference = compare(name, adapted(name))
    assert difference["logits"] < 1e-8
    assert difference["state"] < 1e-8


@pytest.mark.parametrize("name", ["rmtlib_eta", "rmtlib_eata_f2e5", "eata_official_eta_d005"])
def test_selection_and_average_prediction_equal_the_trace(name: str) -> None:
    adaptive, seen = adapted(name), []
    for images in stream():
        adaptive(images)
        seen.append((adaptive.last.reliable * 32, adaptive.last.selected * 32, adaptive.method.average.numpy()))
    reliable, selected, average = (np.array(column) for column in zip(*seen, strict=True))
    expected = trace(name)
    assert np.array_equal(reliable.round().cumsum(), expected["batch/n_reliable"])
    assert np.array_equal(selected.round().cumsum(), expected["batch/n_selected"])
    assert np.abs(average - expected["batch/probs_ema"]).max() < 1e-9


def test_losses_equal_the_trace() -> None:
    adaptive, losses = adapted("rmtlib_eata"), []
    for images in stream():
        adaptive(images)
        losses.append(adaptive.last.loss)
    np.testing.assert_allclose(losses, trace("rmtlib_eata")["loss"][:, -1], rtol=1e-8)


def test_fisher_information_equals_the_trace() -> None:
    expected = trace("rmtlib_eata")
    method = adapted("rmtlib_eata").method
    fisher = method.fisher.split([parameter.numel() for parameter in method.trainable.values()])
    for name, own in zip(method.trainable, fisher, strict=True):
        np.testing.assert_allclose(own.numpy(), expected[f"init/fisher/{name}"], rtol=1e-9, atol=1e-18)


@pytest.mark.parametrize("name", CASES)
def test_same_classes_in_single_precision(name: str) -> None:
    require_same_classes(name, adapted(name, torch.float32), margin=5e-3, least=0.9)
