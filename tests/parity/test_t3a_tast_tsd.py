"""T3A, TAST, TAST-BN and TSD against traces of their authors' code."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import dpl
from dpl.memory.supports import EMPTY
from dpl.methods.parts.supports import SupportSet
from parity.tiny import MEASURED, logits_difference, project, same_classes, stream, tiny_network, trace

T3A = {"t3alib_t3a_k5": 5, "t3alib_t3a_k20": 20, "t3alib_t3a_k-1": -1}
HEAD = {"weight": "weight", "alpha_be": "scale_in", "gamma_be": "scale_out", "ensemble_bias": "bias"}


def listed(supports: SupportSet) -> dict[str, Tensor]:
    """The support set as the traces hold it: class by class, rising entropy, labels one-hot."""
    order = supports.entropies.argsort(dim=1)
    entropies = supports.entropies.gather(1, order)
    features = supports.features.gather(1, order[:, :, None].expand_as(supports.features))
    held = entropies < EMPTY
    classes = torch.arange(len(held))[:, None].expand_as(held)[held]
    labels = torch.nn.functional.one_hot(classes, len(held)).double()
    return {"supports": features[held], "labels": labels, "ent": entropies[held]}


def with_traced_head(adaptive: dpl.AdaptiveModel) -> dpl.AdaptiveModel:
    """Give TAST the head that the traced run drew."""
    drawn = {f"method.head.{own}": torch.from_numpy(trace("tast")[f"init/head/{key}"]) for key, own in HEAD.items()}
    adaptive.load_state_dict(adaptive.state_dict() | drawn)
    return adaptive


def run(adaptive: dpl.AdaptiveModel, dtype: torch.dtype = torch.float64) -> tuple[np.ndarray, dict[str, Tensor]]:
    """All outputs, and everything a trace may hold after the first batch."""
    outputs, first = [], {}
    for i, images in enumerate(stream(dtype)):
        outputs.append(adaptive(images).numpy())
        if i == 0:
            method = adaptive.method
            first = {key: value.clone() for key, value in adaptive.model.state_dict().items()}
            first |= listed(method.supports) if hasattr(method, "supports") else {}
            state = adaptive.state_dict()
            first |= {
                f"head/{key}": state[f"method.head.{own}"] for key, own in HEAD.items() if "method.head.bias" in state
            }
    return np.stack(outputs), first


def build(name: str, dtype: torch.dtype = torch.float64) -> dpl.AdaptiveModel:
    makers: dict[str, Callable[[Any], dpl.AdaptiveModel]] = {
        "tast": lambda model: with_traced_head(dpl.adapt(model, "tast", filter_k=20, neighbours=4, ensemble_size=5)),
        "tast_bn": lambda model: dpl.adapt(model, "tast_bn", filter_k=5, neighbours=4),
        "tsd": lambda model: dpl.adapt(model, "tsd", filter_k=20),
    }
    make = makers.get(name, lambda model: dpl.adapt(model, "t3a", filter_k=T3A[name], authors=T3A[name] == -1))
    return make(tiny_network()).to(dtype)


def expected(name: str) -> np.ndarray:
    """The traced outputs in our convention: TAST's are probabilities, ours their logarithms."""
    logits = trace(name)["logits"]
    return np.log(logits) if name.startswith("tast") else logits


NAMES = [*T3A, "tast", "tast_bn", "tsd"]


def state_difference(name: str, first: dict[str, Tensor]) -> float:
    """The largest difference in the state after the first batch.

    TSD's traced `scores` only serve a loss whose weight is zero; ours keeps none.
    """
    differences = [
        np.abs(project(key, first[key].numpy()) - values).max()
        for key, values in ((key.removeprefix("state1/"), values) for key, values in trace(name).items())
        if f"state1/{key}" in trace(name) and key != "scores" and values.dtype.kind == "f"
    ]
    assert len(differences) > 6
    MEASURED[name]["state"] = float(max(differences))
    return float(max(differences))


@pytest.mark.parametrize("name", NAMES)
def test_equals_the_trace(name: str) -> None:
    outputs, first = run(build(name))
    assert logits_difference(name, outputs, expected(name)) < 1e-11
    assert state_difference(name, first) < 1e-11


@pytest.mark.parametrize("name", NAMES)
def test_same_classes_in_single_precision(name: str) -> None:
    outputs, _ = run(build(name, torch.float32), torch.float32)
    clear, equal = same_classes(outputs, expected(name), margin=1e-3)
    assert clear > 0.9
    assert equal == 1
