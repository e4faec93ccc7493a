"""A second pass over the selected samples gives the update of a graph over the whole batch, and costs less."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import dpl
from dpl.methods.parts.norm_rules import AutoBlend, BatchStatistics, BlendedStatistics
from dpl.network import Network
from dpl.objectives import entropy
from nets import CLASSES, network

IMAGES = torch.rand(8, 3, 16, 16, generator=torch.Generator().manual_seed(1))
SELECTING = ("pl", "arcface", "proxy_nca", "dpl_o", "dpl_star", "dpl", "dpl_dagger", "eta", "sar", "deyo", "eta+dpl")


def threshold(model: nn.Module) -> float:
    """The confidence that half of the images exceed."""
    with torch.no_grad():
        return float(model(IMAGES).softmax(dim=1).max(dim=1).values.quantile(0.5))


def settings(method: str, model: nn.Module) -> dict[str, Any]:
    own: dict[str, Any] = {"norm": "running", "lr": 1e-3, "optimizer": "sgd"}
    if method.startswith(("eta", "sar", "deyo")):
        own |= {"margin": float(entropy(model(IMAGES).detach()).quantile(0.5) / math.log(CLASSES))}
    else:
        own["confidence"] = threshold(model)
    return own | ({"dpl_confidence": threshold(model)} if "+" in method else {})


@pytest.mark.parametrize("kind", ["batch", "group", "tokens"])
@pytest.mark.parametrize("method", SELECTING)
def test_both_forms_take_the_same_step(method: str, kind: str) -> None:
    model = network(kind)
    once, twice = (
        dpl.adapt(model, method, second_pass=form, **settings(method, model)) for form in ("never", "always")
    )
    for _ in range(3):
        assert torch.allclose(once(IMAGES), twice(IMAGES), atol=1e-5)
    assert once.last["updated"] == twice.last["updated"]
    for ours, plain in zip(twice.model.parameters(), once.model.parameters(), strict=True):
        assert torch.allclose(ours, plain, rtol=1e-4, atol=1e-6)


class CountedConvolutions(TorchDispatchMode):
    """Counts the samples of every convolution's backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.backward: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.convolution_backward.default:
            self.backward.append(len(args[0]))
        return func(*args, **(kwargs or {}))


def test_only_selected_samples_are_differentiated_once_few_were_selected() -> None:
    model = dpl.adapt(network(), "dpl", confidence=threshold(network()), lr=0.0)
    model.predict(IMAGES)  # the network is confirmed outside the count
    counts = []
    for _ in range(2):
        with CountedConvolutions() as counted:
            model(IMAGES)
        counts.append(counted.backward)
    assert counts == [[8, 8], [4, 4]]


def test_a_batch_without_a_selected_sample_changes_nothing() -> None:
    model = dpl.adapt(network(), "dpl", confidence=1.0, second_pass="always")
    before = model.state_dict()
    model(IMAGES)
    assert model.last["updated"] is False
    assert model.last["reason"] == "fewer than two classes among the confident samples"
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items() if key.startswith("model."))


class Mixing(nn.Module):
    """Looks at the whole batch."""

    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(dim=0)


def test_networks_and_statistics_that_mix_samples_are_recognised() -> None:
    mixing = Network(nn.Sequential(network(), Mixing()))
    mixing.confirm(IMAGES)
    assert not mixing.samples_are_independent
    plain = Network(network())
    plain.confirm(IMAGES)
    assert plain.samples_are_independent
    for rule in (BatchStatistics(), BlendedStatistics(0.1), AutoBlend()):
        with plain.norm.using(rule):
            assert not plain.samples_are_independent
