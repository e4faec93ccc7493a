"""The rules "median" and "unmix" of `norm` against traces of MedBN and UnMix-TNS."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import dpl
from dpl.methods.parts import norm_rules as norm
from dpl.methods.parts.norm_rules import UnMix
from parity.tiny import compare, largest_state_difference, logits_difference, run, stream, tiny_network, trace


def test_median_equals_the_trace() -> None:
    logits, _ = run(dpl.adapt(tiny_network(), "norm", norm="median"), stream())
    assert logits_difference("medbn_norm", logits) < 1e-9


def test_tent_with_the_median_equals_the_trace() -> None:
    difference = compare("medbn_tent", dpl.adapt(tiny_network(), "tent", norm="median"))
    assert difference["logits"] < 1e-9
    assert difference["state"] < 1e-9


def components(adaptive: dpl.AdaptiveModel) -> dict[str, Tensor]:
    """The components by their traced names, as views of the rule's memory."""
    rule: Any = adaptive.network.norm.rule
    found = {}
    for name, layer in adaptive.model.named_modules():
        if columns := adaptive.network.norm.columns.get(layer):
            found[f"{name}.running_means_mat"] = rule.means[:, columns]
            found[f"{name}.running_vars_mat"] = rule.variances[:, columns]
    return found


@pytest.mark.parametrize(("name", "count", "largest"), [("unmixtns", 16, 64), ("unmixtns_k4", 4, 32)])
def test_unmix_equals_the_trace(name: str, count: int, largest: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(norm.RULES, "unmix", lambda: UnMix(count, largest))
    adaptive = dpl.adapt(tiny_network(), "norm", norm="unmix")
    for key, value in components(adaptive).items():
        value.copy_(torch.from_numpy(trace(name)[f"init/{key}"]))
    outputs, first = [], {}
    for images in stream():
        outputs.append(adaptive(images).numpy())
        first = first or {key: value.clone() for key, value in components(adaptive).items()}
    assert logits_difference(name, np.stack(outputs)) < 1e-9
    assert largest_state_difference(name, first) < 1e-9
