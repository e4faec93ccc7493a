import pytest
import torch

import dpl
from dpl.guard import GuardSettings
from dpl.guard.inputs import CONSTANT, COPY, RowCheck
from nets import images, network


def check(**settings: float) -> RowCheck:
    return RowCheck(GuardSettings(**settings))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 1e20, -1e20, 10.0, -7.0])
def test_an_image_with_an_invalid_value_is_refused_alone(value: float) -> None:
    batch = images(32)
    batch[5, 1, 2, 3] = value
    examined = check().examine(batch)
    assert list(examined.refused) == [5]
    assert ("not finite" if abs(value) == float("inf") or value != value else "out of range") in examined.refused[5]
    assert examined.usual_peak == 1.0


@pytest.mark.parametrize("scale", [0.0, 0.05, 1.0, 2.6, 255.0])
def test_ordinary_images_of_any_scale_are_accepted(scale: float) -> None:
    rows = check()
    for seed in range(5):
        examined = rows.examine(scale * (2 * images(16, seed) - 1))
        assert not examined.refused
        rows.update_peak(examined)


def test_normal_images_are_accepted_after_dark_ones() -> None:
    rows = check()
    rows.update_peak(rows.examine(0.02 * images(16)))
    assert not rows.examine(images(16)).refused


def test_a_minority_of_large_values_does_not_change_the_usual_range() -> None:
    rows, batch = check(), images(16)
    batch[:7] = 1e5
    examined = rows.examine(batch)
    assert list(examined.refused) == list(range(7))
    rows.update_peak(examined)
    one = torch.full((1, 3, 8, 8), 50.0)
    assert rows.examine(one).refused, "a batch of one has no majority of its own once the usual peak is known"


def test_examining_changes_nothing() -> None:
    rows = check()
    rows.examine(100 * images(4))
    assert rows.usual_peak is None


def test_images_outside_a_given_range_are_refused() -> None:
    batch = images(4)
    batch[2, 0, 0, 0], batch[3, 0, 0, 0] = -0.01, 1.01
    assert list(check(low=0.0, high=1.0).examine(batch).refused) == [2, 3]


def test_all_images_of_a_batch_can_be_refused() -> None:
    assert len(check().examine(torch.full((3, 3, 8, 8), torch.nan)).refused) == 3


def test_constant_frames_and_further_copies_are_useless() -> None:
    batch = images(16)
    batch[2], batch[3], batch[9], batch[12] = 0.0, 0.7, batch[5].clone(), batch[5].clone()
    examined = check().examine(batch)
    assert not examined.refused
    assert examined.useless == {2: CONSTANT, 3: CONSTANT, 9: COPY, 12: COPY}


@pytest.mark.parametrize("size", [1, 2, 257])
def test_different_images_are_no_copies(size: int) -> None:
    batch = images(size)
    assert not check().examine(batch).useless
    nearly = batch.clone()
    nearly[:, 0, 0, 0] += 0.01
    assert not check().examine(torch.cat([batch, nearly])).useless


def test_the_model_never_sees_useless_images() -> None:
    model, clean = (dpl.adapt(network(), "tent", guard=True) for _ in range(2))
    source = network().eval()
    useless = torch.tensor([1, 4, 5, 14])
    for seed in range(3):
        batch = images(20, seed)
        batch[[1, 4]], batch[[5, 14]] = 0.0, batch[3].clone()
        useful = torch.ones(20, dtype=torch.bool).index_fill(0, useless, False)
        assert torch.equal(model.predict(batch)[useful], clean.predict(batch[useful]))
        logits = model(batch)
        assert torch.equal(logits[useful], clean(batch[useful]))
        with torch.no_grad():
            assert torch.allclose(logits[~useful], source(batch)[~useful], atol=1e-6)
    assert list(model.last["useless"]) == useless.tolist()
    assert model.last["set_aside"] == {}
    assert model.last["updated"]
    assert model.guard.counts["not_learnt"] == 12


def test_a_batch_without_a_useful_image_changes_nothing() -> None:
    model = dpl.adapt(network(), "tent", guard=True)
    before = {key: value for key, value in model.state_dict().items() if not key.startswith("guard.")}
    batch = torch.full((16, 3, 8, 8), 0.5)
    with torch.no_grad():
        assert torch.allclose(model(batch), network().eval()(batch), atol=1e-6)
    assert model.last["guard"]["answered_by"] == "source"
    assert "no useful image" in model.last["reason"]
    after = model.state_dict()
    assert all(torch.equal(value, after[key]) for key, value in before.items())
