"""Predictions that depend on the batch change when distractors join it; the others do not."""

import pytest
import torch
from torch import Tensor, nn

import dpl
from abuse import streams
from dpl.guard.batch_dependence import distractor_images, stable_in_larger_batch


def stable_share(method: str, batches: list[streams.Batch]) -> float:
    model = dpl.adapt(streams.network(), method)
    stable = torch.cat([stable_in_larger_batch(model.method.predict, images) for images, _ in batches])
    return float(stable.float().mean())


@pytest.mark.parametrize("shift", ["noise", "shifted"])
def test_predictions_by_batch_statistics_of_one_class_are_not_stable(shift: str) -> None:
    for label in (1, 4, 8):
        assert stable_share("norm", streams.one_class(shift, 32 * 4, label=label)) < 0.7


@pytest.mark.parametrize("shift", ["noise", "shifted", "easy"])
def test_predictions_by_batch_statistics_of_all_classes_are_stable(shift: str) -> None:
    assert stable_share("norm", streams.iid(shift, 32 * 8)) > 0.76


def test_predictions_by_running_statistics_are_always_stable() -> None:
    assert stable_share("source", streams.one_class("noise", 32)) == 1.0


def test_the_images_come_first_in_the_larger_batch_and_only_they_are_compared() -> None:
    seen: list[Tensor] = []

    def by_mean(images: Tensor) -> Tensor:
        seen.append(images)
        above = images.mean(dim=(1, 2, 3)) > images.mean()
        return torch.stack([above, ~above], dim=1).float()

    images = torch.rand(6, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    assert stable_in_larger_batch(by_mean, images).shape == (6,)
    assert [len(batch) for batch in seen] == [6, 18]
    assert torch.equal(seen[1][:6], images)


def test_distractors_are_rotated_and_stay_in_range() -> None:
    images = torch.rand(4, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    distractors = distractor_images(images)
    assert torch.equal(distractors[:4], images.rot90(1, (2, 3)))
    assert distractors.shape == (8, 3, 8, 8)
    low, high = images.amin(dim=(0, 2, 3), keepdim=True), images.amax(dim=(0, 2, 3), keepdim=True)
    assert ((distractors >= low - 1e-6) & (distractors <= high + 1e-6)).all()


def test_distractors_of_images_that_are_not_square_keep_their_shape() -> None:
    assert distractor_images(torch.rand(2, 1, 6, 10)).shape == (4, 1, 6, 10)


@pytest.mark.parametrize("shape", [(16, 12), (16, 4, 10)])
def test_inputs_that_are_not_images_have_negatives_as_distractors(shape: tuple[int, ...]) -> None:
    rows = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    distractors, within = distractor_images(rows), [0, 2][: rows.ndim - 1]
    assert distractors.shape == rows.shape
    assert torch.allclose(distractors.amax(dim=within), rows.amax(dim=within))  # of the same range
    assert not torch.allclose(distractors, rows)


@pytest.mark.parametrize("method", ["norm", "tent"])
def test_a_guarded_model_of_vectors_stays_finite_in_a_drift_and_the_guard_acts(method: str) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(12, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 10))
    model = dpl.adapt(net, method, guard=True)
    for i in range(20):
        logits = model(torch.randn(16, 12) * (1 if i < 10 else 5) + i)
        assert logits.isfinite().all()
    assert model.guard is not None
    assert sum(model.guard.counts.values()) > 0
