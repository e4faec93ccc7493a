"""AdaContrast against traces of the RMT library."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import dpl
from parity.tiny import project, require_same_classes, require_the_trace, tiny_network, trace


def rolled_views() -> dict[str, Callable[[Tensor], Tensor]]:
    """The weak view is one roll; the strong view is called for the query, then for the key."""
    calls = [0]

    def strong(images: Tensor) -> Tensor:
        calls[0] += 1
        return torch.roll(images, (1, 0) if calls[0] % 2 else (0, -1), dims=(2, 3))

    return {"weak": lambda images: torch.roll(images, (0, 1), dims=(2, 3)), "strong": strong}


def equal_views() -> dict[str, Callable[[Tensor], Tensor]]:
    return {"weak": lambda images: images, "strong": lambda images: images}


def adapted(name: str, dtype: torch.dtype = torch.float64) -> dpl.AdaptiveModel:
    """AdaContrast with the queue that the traced run drew; with neighbours it has seen images before."""
    with_neighbours = name.endswith("nn_views")
    settings: dict[str, Any] = rolled_views() | {"momentum": 0.9} if with_neighbours else equal_views()
    adaptive = dpl.adapt(tiny_network(dtype), "adacontrast", lr=0.01, queue_size=256, authors=True, **settings)
    drawn = {
        "method.queue": torch.from_numpy(trace(name)["init/queue_feat"]).T.to(dtype),
        "method.queue_labels": torch.from_numpy(trace(name)["init/queue_labels"]),
        "method.seen": torch.tensor(960 if with_neighbours else 0),
    }
    adaptive.load_state_dict(adaptive.state_dict() | drawn)
    return adaptive


@pytest.mark.parametrize("name", ["rmtlib_adacontrast", "rmtlib_adacontrast_nn_views"])
def test_equals_the_trace(name: str) -> None:
    adaptive, expected = adapted(name), trace(name)
    said = require_the_trace(name, adaptive, 1e-10)
    assert np.abs(np.array([step["loss"] for step in said]) - expected["loss"][:, 0]).max() < 1e-10
    method = adaptive.method
    for key, value in {"queue_feat": method.queue.T, "bank_probs": method.bank_probabilities}.items():
        assert np.abs(project(key, value.numpy()) - expected[f"final/{key}"]).max() < 1e-10
    assert (method.queue_labels.numpy() == expected["final/queue_labels"]).all()
    assert (method.queue_next, method.bank_next) == (expected["final/queue_ptr"], expected["final/bank_ptr"])


def test_same_classes_in_single_precision() -> None:
    name = "rmtlib_adacontrast_nn_views"
    require_same_classes(name, adapted(name, torch.float32), margin=1e-3, least=0.99)
