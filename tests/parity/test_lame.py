"""LAME against traces of its authors' code, which returns probabilities."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import dpl
from parity.tiny import logits_difference, run, stream, tiny_network, trace

CASES: dict[str, dict[str, Any]] = {
    "lame_official_rbf5": {},
    "lame_official_knn5": {"affinity": "knn"},
    "lame_official_linear": {"affinity": "linear"},
    "lame_official_rbf3_sorted": {"neighbours": 3},
}


def batches_of(name: str) -> list[Tensor]:
    """The traced stream; in the sorted one the images come in the order of their labels."""
    if not name.endswith("sorted"):
        return stream()
    return list(torch.cat(stream())[torch.from_numpy(trace(name)["init/order"]).long()].split(32))


@pytest.mark.parametrize("name", CASES)
def test_equals_the_trace(name: str) -> None:
    logits, _ = run(dpl.adapt(tiny_network(), "lame", **CASES[name]), batches_of(name))
    assert logits_difference(name, np.exp(logits)) < 1e-9
