"""ETA, EATA, SAR and ROID against traces of their authors' code and of the RMT library."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import dpl
from parity.tiny import Roll, clean_test_images, compare, run, source_images, stream, tiny_network, trace

SGD = {"lr": 0.025, "optimizer": "sgd"}
CASES: list[tuple[str, str, dict[str, Any]]] = [
    ("rmtlib_eta", "eta", {}),
    ("rmtlib_eta_sgd", "eta", {"lr": 0.025, "optimizer": "nesterov"}),
    ("eata_official_eta", "eta", SGD),
    ("eata_official_eta_d005", "eta", {**SGD, "max_similarity": 0.05}),
    ("rmtlib_eata", "eata", {"fisher_weight": 2000.0, "fisher_samples": 128}),
    ("rmtlib_eata_f2e5", "eata", {"fisher_weight": 2e5, "fisher_samples": 128}),
    ("rmtlib_sar", "sar", {}),
    ("rmtlib_sar_lr2e-2", "sar", {"lr": 0.02}),
    ("rmtlib_sar_mixed", "sar", {"lr": 0.02, "authors": "rmt"}),
    ("sar_official_mixed", "sar", {"lr": 0.02, "authors": "official"}),
    ("rmtlib_roid", "roid", {"augment": torch.clone}),
    ("rmtlib_roid_nocons", "roid", {"consistency": False}),
    ("rmtlib_roid_roll", "roid", {"augment": Roll}),
]


def adapted(method: str, settings: dict[str, Any], dtype: torch.dtype = torch.float64) -> dpl.AdaptiveModel:
    """A fresh adaptive model; EATA gets the source images in batches of 32."""
    settings = {key: value() if value is Roll else value for key, value in settings.items()}
    images, labels = source_images(dtype)
    source = list(zip(images.split(32), labels.split(32), strict=True)) if method == "eata" else None
    return dpl.adapt(tiny_network(dtype), method, source=source, **settings)


def batches_of(name: str, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    """The traced stream: in the mixed ones three clean batches come first."""
    plain = stream(dtype)
    return [*clean_test_images(dtype).split(32), *plain[:9]] if name.endswith("mixed") else plain


by_name = pytest.mark.parametrize(("name", "method", "settings"), CASES, ids=[case[0] for case in CASES])


@by_name
def test_equals_the_trace(name: str, method: str, settings: dict[str, Any]) -> None:
    difference = compare(name, adapted(method, settings), batches_of(name))
    assert difference["logits"] < 1e-8
    assert difference["state"] < 1e-8


@by_name
def test_single_precision_decides_alike(name: str, method: str, settings: dict[str, Any]) -> None:
    expected = trace(name)["logits"]
    logits, _ = run(adapted(method, settings, torch.float32), batches_of(name, torch.float32))
    top = np.sort(expected, axis=2)
    clear = top[..., -1] - top[..., -2] > 5e-3
    assert clear.mean() > 0.9
    assert (logits.argmax(axis=2) == expected.argmax(axis=2))[clear].all()


def follow(name: str, look: Callable[[dpl.AdaptiveModel], Any]) -> list[Any]:
    """Run the named case and return what `look` sees after each batch."""
    _, method, settings = next(case for case in CASES if case[0] == name)
    adaptive = adapted(method, settings)
    seen = []
    for images in batches_of(name):
        adaptive(images)
        seen.append(look(adaptive))
    return seen


@pytest.mark.parametrize("name", ["rmtlib_eta", "rmtlib_eata_f2e5", "eata_official_eta_d005"])
def test_selection_and_average_prediction_follow_the_trace(name: str) -> None:
    seen = follow(name, lambda a: (a.last.reliable * 32, a.last.selected * 32, a.method.average.numpy()))
    reliable, selected, average = (np.array(column) for column in zip(*seen, strict=True))
    expected = trace(name)
    assert np.array_equal(reliable.round().cumsum(), expected["batch/n_reliable"])
    assert np.array_equal(selected.round().cumsum(), expected["batch/n_selected"])
    assert np.abs(average - expected["batch/probs_ema"]).max() < 1e-9


@pytest.mark.parametrize("name", ["rmtlib_sar", "rmtlib_sar_mixed", "sar_official_mixed"])
def test_average_loss_follows_the_trace(name: str) -> None:
    seen = follow(name, lambda a: np.nan if a.method.average is None else float(a.method.average))
    np.testing.assert_allclose(seen, trace(name)["batch/ema"], rtol=0, atol=1e-9)


def test_average_prediction_of_roid_follows_the_trace() -> None:
    seen = follow("rmtlib_roid_roll", lambda a: a.method.average.numpy())
    assert np.abs(np.array(seen) - trace("rmtlib_roid_roll")["batch/class_probs_ema"]).max() < 1e-9


@pytest.mark.parametrize("name", ["rmtlib_eata", "rmtlib_sar_lr2e-2", "rmtlib_roid_roll"])
def test_losses_follow_the_trace(name: str) -> None:
    expected = trace(name)["loss"][:, -1]
    np.testing.assert_allclose(follow(name, lambda a: a.last.loss), expected, rtol=1e-8)


def test_fisher_information_equals_the_trace() -> None:
    expected = trace("rmtlib_eata")
    method = adapted("eata", {"fisher_samples": 128}).method
    fisher = method.fisher.split([parameter.numel() for parameter in method.trainable.values()])
    for name, own in zip(method.trainable, fisher, strict=True):
        np.testing.assert_allclose(own.numpy(), expected[f"init/fisher/{name}"], rtol=1e-9, atol=1e-18)
