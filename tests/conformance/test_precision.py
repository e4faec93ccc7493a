"""Every method in lower precision: autocast, networks in bfloat16, and float16, whose gradients may overflow."""

import itertools
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import dpl
from conformance.subjects import names, subject
from dpl.data.corruptions import corrupt
from dpl.testing import Subject
from nets import images, network

SHARED = Path(__file__).resolve().parents[3] / "shared" / "data"
# What a method averages over many batches: a bfloat16 would round small changes away.
AVERAGES = {
    "delta": ["method.norm_rule.means", "method.norm_rule.deviations"],
    "dpl": ["method.term.memory"],
    "petta": ["method.means", "method.source_mean", "method.source_variance"],
    "tent+dpl": ["method.dpl.memory"],
}


@pytest.mark.parametrize("name", names())
def test_a_network_in_bfloat16_adapts_and_stays_finite(name: str) -> None:
    one = subject(name)
    source = one.source and [(batch.bfloat16(), labels) for batch, labels in one.source]
    half = Subject(name, one.network.bfloat16(), [b.bfloat16() for b in one.batches], one.settings, source)
    model = half.adapt()
    assert all(logits.dtype == torch.bfloat16 and logits.isfinite().all() for logits in half.run(model, 4))
    state = model.state_dict()
    assert all(bool(value.isfinite().all()) for key, value in state.items() if key.startswith("model."))
    assert {state[key].dtype for key in AVERAGES.get(name, [])} <= {torch.float32}


@pytest.mark.parametrize("second_pass", ["always", "never"])
def test_one_autocast_around_many_batches_sees_every_step(second_pass: str) -> None:
    """Autocast keeps converted weights while it is on; they must follow the optimizer, and carry gradients."""
    batches = [images(8, seed=i) for i in range(4)]
    around, inside = (dpl.adapt(network(), "dpl", confidence=0.1, lr=0.01, second_pass=second_pass) for _ in range(2))
    with torch.autocast("cpu", torch.bfloat16):
        for batch in batches:
            around(batch)
    for batch in batches:
        with torch.autocast("cpu", torch.bfloat16):
            inside(batch)
    before, after = dict(network().named_parameters()), around.state_dict()
    assert not torch.equal(after["model.layer1.0.weight"], before["layer1.0.weight"])
    assert all(torch.equal(value, after[key]) for key, value in inside.state_dict().items())


def overflowing(at: int) -> nn.Module:
    """Return a network whose backward pass number `at` gives infinite gradients, though every loss is finite."""
    source, passes = network(), itertools.count()

    def overflow(_layer: nn.Module, _inputs: object, output: Tensor) -> None:
        if output.requires_grad:
            output.register_hook(lambda gradient: gradient * torch.inf if next(passes) == at else gradient)

    source.get_submodule("layer1").register_forward_hook(overflow)
    return source


@pytest.mark.parametrize(
    ("name", "at", "settings"), [("tent", 0, {}), ("dpl", 0, {"confidence": 0.1}), ("sar", 1, {"margin": 2.0})]
)
def test_float16_gradients_that_overflow_skip_the_step(name: str, at: int, settings: dict[str, Any]) -> None:
    model = dpl.adapt(overflowing(at), name, **settings)
    before = model.state_dict()
    with torch.autocast("cpu", torch.float16):
        assert model(images()).isfinite().all()
        assert math.isfinite(model.last["loss"])
        assert model.last["updated"] is False
        after = model.state_dict()
        assert all(torch.equal(value, after[key]) for key, value in before.items() if key.startswith("model."))
        model(images(seed=1))
    assert model.last["updated"] is True


def test_the_reason_of_a_skipped_step_is_given() -> None:
    model = dpl.adapt(overflowing(0), "tent")
    with torch.autocast("cpu", torch.float16):
        model(images())
    assert model.last["reason"] == "the gradients are not finite"


@pytest.mark.shared
@pytest.mark.skipif(not (SHARED / "weights").is_dir(), reason=f"no trained weights at {SHARED}")
@pytest.mark.parametrize("name", ["tent", "eta", "dpl", "dpl_soft"])
def test_autocast_reaches_the_accuracy_of_float32(name: str) -> None:
    with np.load(SHARED / "cifar10_test.npz") as data:
        shown = torch.from_numpy(corrupt(data["images"][:1000], "contrast", 3)).permute(0, 3, 1, 2).float() / 255
        labels = torch.from_numpy(data["labels"][:1000].astype(np.int64))
    source = dpl.backbones.create("cifar_resnet20", weights=SHARED / "weights/cifar10_resnet20.safetensors")

    def accuracy(*, autocast: bool) -> float:
        model = dpl.adapt(source, name)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            guesses = torch.cat([model(batch).argmax(dim=1) for batch in shown.split(100)])
        return 100 * float((guesses == labels).float().mean())

    assert abs(accuracy(autocast=True) - accuracy(autocast=False)) <= 0.5
