"""Answers that belong to the batch change in other company; answers that belong to the rows do not."""

import pytest
import torch
from torch import Tensor, nn

import dpl
from abuse import streams
from dpl.guard.batch_dependence import answers_kept, company_of


def share_kept(method: str, batches: list[streams.Batch]) -> float:
    model = dpl.adapt(streams.network(), method)
    kept = torch.cat([answers_kept(model.method.predict, images) for images, _ in batches])
    return float(kept.float().mean())


@pytest.mark.parametrize("shift", ["noise", "shifted"])
def test_batch_statistics_of_one_class_do_not_survive(shift: str) -> None:
    for label in (1, 4, 8):
        assert share_kept("norm", streams.one_class(shift, 32 * 4, label=label)) < 0.7


@pytest.mark.parametrize("shift", ["noise", "shifted", "easy"])
def test_batch_statistics_of_all_classes_do(shift: str) -> None:
    assert share_kept("norm", streams.iid(shift, 32 * 8)) > 0.76


def test_answers_given_row_by_row_always_do() -> None:
    assert share_kept("source", streams.one_class("noise", 32)) == 1.0


def test_only_the_first_rows_are_compared() -> None:
    seen: list[Tensor] = []

    def by_mean(images: Tensor) -> Tensor:
        seen.append(images)
        above = images.mean(dim=(1, 2, 3)) > images.mean()
        return torch.stack([above, ~above], dim=1).float()

    images = torch.rand(6, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    assert answers_kept(by_mean, images).shape == (6,)
    assert [len(batch) for batch in seen] == [6, 18]
    assert torch.equal(seen[1][:6], images)


def test_the_company_is_turned_and_stays_in_range() -> None:
    images = torch.rand(4, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    company = company_of(images)
    assert torch.equal(company[:4], images.rot90(1, (2, 3)))
    assert company.shape == (8, 3, 8, 8)
    low, high = images.amin(dim=(0, 2, 3), keepdim=True), images.amax(dim=(0, 2, 3), keepdim=True)
    assert ((company >= low - 1e-6) & (company <= high + 1e-6)).all()


def test_images_that_are_not_square_keep_their_shape() -> None:
    assert company_of(torch.rand(2, 1, 6, 10)).shape == (4, 1, 6, 10)


@pytest.mark.parametrize("shape", [(16, 12), (16, 4, 10)])
def test_rows_that_are_not_pictures_have_company_too(shape: tuple[int, ...]) -> None:
    rows = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    company, within = company_of(rows), [0, 2][: rows.ndim - 1]
    assert company.shape == rows.shape
    assert torch.allclose(company.amax(dim=within), rows.amax(dim=within))  # of the same range
    assert not torch.allclose(company, rows)


@pytest.mark.parametrize("method", ["norm", "tent"])
def test_a_guarded_model_of_vectors_survives_a_drift(method: str) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(12, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 10))
    model = dpl.adapt(net, method, guard=True)
    for i in range(20):
        logits = model(torch.randn(16, 12) * (1 if i < 10 else 5) + i)
        assert logits.isfinite().all()
    assert model.guard is not None
    assert sum(model.guard.counts.values()) > 0  # it was asked, and acted
