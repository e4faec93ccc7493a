import pytest
import torch

from dpl.guard import GuardSettings
from dpl.guard.inputs import RowCheck
from nets import images


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
        rows.remember(examined)


def test_normal_images_are_accepted_after_dark_ones() -> None:
    rows = check()
    rows.remember(rows.examine(0.02 * images(16)))
    assert not rows.examine(images(16)).refused


def test_a_minority_of_large_values_does_not_change_the_usual_range() -> None:
    rows, batch = check(), images(16)
    batch[:7] = 1e5
    examined = rows.examine(batch)
    assert list(examined.refused) == list(range(7))
    rows.remember(examined)
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
