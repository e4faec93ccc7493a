"""SHOT and SHOT-IM against traces of the T3A and TSD libraries."""

from typing import Any

import pytest
import torch

import dpl
from parity.tiny import compare, require_same_classes, stream, tiny_network, trace

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "t3alib_shot": ("shot", {"lr": 5e-4}),
    "t3alib_shotim": ("shot_im", {"lr": 5e-4}),
    "tsdrepo_shotim": ("shot_im", {"lr": 1e-4, "norm": "track"}),
}


def adapted(name: str, dtype: torch.dtype = torch.float64) -> dpl.AdaptiveModel:
    method, settings = CASES[name]
    return dpl.adapt(tiny_network(dtype), method, **settings)


@pytest.mark.parametrize("name", CASES)
def test_equals_the_trace(name: str) -> None:
    difference = compare(name, adapted(name))
    assert difference["logits"] < 1e-10
    assert difference["state"] < 1e-10


@pytest.mark.parametrize("name", ["t3alib_shot", "t3alib_shotim"])
def test_losses_equal_the_trace(name: str) -> None:
    adaptive = adapted(name)
    for images, loss in zip(stream(), trace(name)["loss"][:, 0], strict=True):
        adaptive(images)
        assert adaptive.last.loss == pytest.approx(loss, abs=1e-10)


@pytest.mark.parametrize("name", CASES)
def test_same_classes_in_single_precision(name: str) -> None:
    require_same_classes(name, adapted(name, torch.float32), margin=5e-3, least=0.98)
