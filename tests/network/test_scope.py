"""What trains, and from which layer on; learning from some batches only."""

import pytest
import torch
from torch import Tensor, nn

import dpl
from nets import images, network


def test_training_starts_at_a_layer() -> None:
    whole, late = dpl.adapt(network(), "dpl"), dpl.adapt(network(), "dpl", train_from="layer2")
    assert {name.split(".")[0] for name in whole.trainable} == {"layer1", "layer2", "fc"}
    assert {name.split(".")[0] for name in late.trainable} == {"layer2", "fc"}
    assert dpl.adapt(network(), "tent", train_from="layer2").trainable == ["layer2.1.weight", "layer2.1.bias"]


def test_what_lies_before_the_start_runs_without_a_graph() -> None:
    model, seen = dpl.adapt(network(), "dpl", train_from="layer2", confidence=0.0), {}

    def look(name: str) -> None:
        def hook(_module: nn.Module, _inputs: object, output: Tensor) -> None:
            seen[name] = output.requires_grad

        model.model.get_submodule(name).register_forward_hook(hook)

    look("layer1")
    look("layer2")
    before = {name: p.detach().clone() for name, p in model.model.named_parameters()}
    model(images())
    assert seen == {"layer1": False, "layer2": True}
    moved = {name for name, p in model.model.named_parameters() if not torch.equal(p, before[name])}
    assert moved
    assert not any(name.startswith("layer1") for name in moved)


def test_a_start_that_is_no_module_or_leaves_nothing_is_refused() -> None:
    with pytest.raises(dpl.ModelError, match="train_from='layer7' is not a module"):
        dpl.adapt(network(), "dpl", train_from="layer7")
    with pytest.raises(dpl.ModelError, match="from train_from='fc' on"):
        dpl.adapt(network(), "tent", train_from="fc")


def test_adapt_every_3_updates_on_every_third_batch() -> None:
    model, updated = dpl.adapt(network(), "dpl", adapt_every=3, confidence=0.0), []
    for seed in range(7):
        model(images(seed=seed))
        updated.append(model.last.updated)
    assert updated == [True, False, False, True, False, False, True]
    model(images())
    assert "adapt_every" in model.last.reason


def test_the_count_of_batches_is_part_of_the_state(tmp_path) -> None:
    model = dpl.adapt(network(), "tent", adapt_every=2)
    model(images())
    again = dpl.load(model.save(tmp_path / "kept"), network())
    again(images(seed=1))
    assert again.last.updated is False
    again.reset()
    again(images())
    assert again.last.updated is True


@pytest.mark.parametrize("method", ["dpl", "pl", "proxy_nca"])
def test_fewer_selected_samples_than_min_selected_take_no_step(method: str) -> None:
    with torch.no_grad():
        alpha = float(network()(images(16)).softmax(1).max(1).values.median())
    eager, idle = (dpl.adapt(network(), method, confidence=alpha, min_selected=share) for share in (0.25, 0.75))
    eager(images(16))
    idle(images(16))
    assert eager.last.updated is True
    assert idle.last.updated is False
    assert idle.last.reason == "too few samples to learn from"
