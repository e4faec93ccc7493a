"""A call either returns and has stepped, or raises and has changed nothing; `make abuse` fails at many more points."""

from typing import Any

import pytest
import torch

import dpl
from conformance.operations import FailAt, Injected, count_operations, first_change
from conformance.subjects import names, subject
from dpl.testing import Subject
from nets import images, network


def points(total: int, count: int = 6) -> list[int]:
    """Operations all over a step, the last ones among them: there the optimizer steps."""
    return sorted({*range(1, total + 1, max(1, total // count)), *range(max(1, total - 2), total + 1)})


def changed_by(one: Subject, **more: Any) -> str | None:
    model = dpl.adapt(one.network, one.method, source=one.source, **{**one.settings, **more})
    one.run(model, 2)
    batch = one.batches[2].clone().requires_grad_()
    return first_change(model, batch, points(count_operations(model, batch)))


@pytest.mark.parametrize("name", names())
def test_a_failed_step_changes_nothing(name: str) -> None:
    assert changed_by(subject(name)) is None


@pytest.mark.parametrize("name", ["tent", "dpl", "cotta", "rotta", "t3a"])
def test_nor_does_one_of_a_guarded_model(name: str) -> None:
    assert changed_by(subject(name), guard=True) is None


@pytest.mark.parametrize(
    "settings",
    [{"steps": 2}, {"output": "after"}, {"norm": "track"}, {"norm": "auto"}, {"estimate": True}, {"adapt_every": 2}],
)
def test_nor_with_other_settings(settings: dict[str, Any]) -> None:
    assert changed_by(subject("dpl"), **settings) is None


def test_nor_with_the_callers_own_optimizer() -> None:
    assert changed_by(subject("tent"), optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3)) is None


@pytest.mark.parametrize("guard", [False, True])
@pytest.mark.parametrize("name", ["tent", "dpl", "dpl_soft", "adacontrast"])
def test_a_callback_that_raises_undoes_the_step(name: str, guard: bool) -> None:
    one = subject(name)
    model = dpl.adapt(one.network, name, guard=guard, **one.settings)
    one.run(model, 2)
    before, last = model.state_dict(), dict(model.last)

    def refuse(_last: object) -> None:
        raise KeyboardInterrupt

    model.on_step = refuse
    with pytest.raises(KeyboardInterrupt):
        model(one.batches[2])
    assert model.last_images is not None
    assert torch.equal(model.last_images, one.batches[1])
    after = model.state_dict()
    assert before.keys() == after.keys()
    assert not [key for key in before if not torch.equal(before[key], after[key])]
    assert dict(model.last) == last


def test_the_images_of_a_failed_call_are_not_kept() -> None:
    model = dpl.adapt(network(), "tent")
    with FailAt(30), pytest.raises(Injected):
        model(images())
    assert model.last_images is None
    model(images(seed=1))
    with FailAt(30), pytest.raises(Injected):
        model(images())
    assert torch.equal(model.last_images, images(seed=1))


def test_a_later_step_is_the_same_after_a_failed_one() -> None:
    one = subject("dpl_soft")
    failed, straight = one.adapt(), one.adapt()
    for model in (failed, straight):
        one.run(model, 2)
    with FailAt(count_operations(failed, one.batches[2]) // 2), pytest.raises(Injected):
        failed(one.batches[2])
    assert torch.equal(failed(one.batches[2]), straight(one.batches[2]))


def test_no_gradient_reaches_images_that_require_one() -> None:
    batch = images().requires_grad_()
    logits = dpl.adapt(network(), "tent")(batch)
    assert batch.grad is None
    assert not logits.requires_grad


@pytest.mark.parametrize("guard", [False, True])
def test_out_of_memory_advises_a_smaller_batch_and_changes_nothing(guard: bool) -> None:
    model = dpl.adapt(network(), "tent", guard=guard)
    model(images())
    before = model.state_dict()
    with FailAt(30, torch.OutOfMemoryError), pytest.raises(torch.OutOfMemoryError, match="smaller batch"):
        model(images(8, seed=1))
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
