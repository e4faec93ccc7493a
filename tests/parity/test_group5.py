"""RMT and AdaContrast against traces of the RMT library."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import dpl
from parity.tiny import (
    Roll,
    largest_state_difference,
    logits_difference,
    project,
    run,
    source_images,
    stream,
    tiny_network,
    trace,
)


def source_batches(dtype: torch.dtype = torch.float64) -> list[tuple[Tensor, Tensor]]:
    images, labels = source_images(dtype)
    return list(zip(images.split(32), labels.split(32), strict=True))


def rmt(name: str, augment: Callable[[Tensor], Tensor], dtype: torch.dtype = torch.float64) -> dpl.AdaptiveModel:
    adaptive = dpl.adapt(
        tiny_network(dtype), "rmt", source=source_batches(dtype), warmup_samples=0, augment=augment, lr=1e-3
    )
    given = {
        f"method.projector.{key.rpartition('/')[2]}": torch.from_numpy(value).to(dtype)
        for key, value in trace(name).items()
        if key.startswith("init/projector/")
    }
    assert len(given) == 4
    adaptive.load_state_dict(adaptive.state_dict() | given)
    return adaptive


def views() -> dict[str, Callable[[Tensor], Tensor]]:
    """The weak view is one roll; the strong view is called for the query, then for the key."""
    calls = [0]

    def strong(images: Tensor) -> Tensor:
        calls[0] += 1
        return torch.roll(images, (1, 0) if calls[0] % 2 else (0, -1), dims=(2, 3))

    return {"weak": lambda images: torch.roll(images, (0, 1), dims=(2, 3)), "strong": strong}


def identities() -> dict[str, Callable[[Tensor], Tensor]]:
    return {"weak": lambda images: images, "strong": lambda images: images}


def adacontrast(name: str, dtype: torch.dtype = torch.float64) -> dpl.AdaptiveModel:
    with_neighbours = name.endswith("nn_views")
    settings: dict[str, Any] = views() | {"momentum": 0.9} if with_neighbours else identities()
    adaptive = dpl.adapt(tiny_network(dtype), "adacontrast", lr=0.01, queue_size=256, authors=True, **settings)
    given = {
        "method.queue": torch.from_numpy(trace(name)["init/queue_feat"]).T.to(dtype),
        "method.queue_labels": torch.from_numpy(trace(name)["init/queue_labels"]),
        "method.seen": torch.tensor(960 if with_neighbours else 0),
    }
    adaptive.load_state_dict(adaptive.state_dict() | given)
    return adaptive


def build(name: str, dtype: torch.dtype = torch.float64) -> dpl.AdaptiveModel:
    if "adacontrast" in name:
        return adacontrast(name, dtype)
    return rmt(name, Roll() if name.endswith("roll") else lambda images: images, dtype)


NAMES = ["rmtlib_rmt", "rmtlib_rmt_roll", "rmtlib_adacontrast", "rmtlib_adacontrast_nn_views"]


@pytest.mark.parametrize("name", NAMES)
def test_equals_the_trace(name: str) -> None:
    adaptive = build(name)
    after_first: dict[str, Tensor] = {}
    outputs, losses = [], []
    for images in stream():
        outputs.append(adaptive(images).numpy())
        losses.append(adaptive.last.loss)
        after_first = after_first or adaptive.state_dict()
    assert logits_difference(name, np.stack(outputs)) < 1e-10
    assert np.abs(np.array(losses) - trace(name)["loss"][:, 0]).max() < 1e-10
    assert largest_state_difference(name, after_first, rename=our_name) < 1e-10
    if "adacontrast" in name:
        check_final_memory(adaptive.method, trace(name))


def our_name(traced: str) -> str:
    owner, slash, key = traced.partition("/")
    part = {"teacher": "teacher.weights"}.get(owner, owner)
    return f"method.{part}.{key}" if slash else f"model.{traced}"


def check_final_memory(method: Any, expected: dict[str, np.ndarray]) -> None:
    ours = {"queue_feat": method.queue.T, "bank_probs": method.bank_probabilities}
    for key, value in ours.items():
        assert np.abs(project(key, value.numpy()) - expected[f"final/{key}"]).max() < 1e-10
    assert (method.queue_labels.numpy() == expected["final/queue_labels"]).all()
    assert (method.queue_next, method.bank_next) == (expected["final/queue_ptr"], expected["final/bank_ptr"])


def test_rmt_computes_the_traced_prototypes_from_the_source() -> None:
    method: Any = rmt("rmtlib_rmt", Roll()).method
    assert np.abs(method.prototypes.numpy() - trace("rmtlib_rmt")["init/prototypes"]).max() < 1e-12


@pytest.mark.parametrize("name", ["rmtlib_rmt_roll", "rmtlib_adacontrast_nn_views"])
def test_single_precision_decides_alike(name: str) -> None:
    logits, _ = run(build(name, torch.float32), stream(torch.float32))
    expected = trace(name)["logits"]
    top = np.sort(expected, axis=2)
    clear = top[:, :, -1] - top[:, :, -2] > 1e-3
    assert clear.mean() > 0.99
    assert (logits.argmax(axis=2) == expected.argmax(axis=2))[clear].all()
