"""Moving averages, random restoring and shared frozen weights."""

import copy

import pytest
import torch
from torch import Tensor, nn

from dpl.core.errors import InputError
from dpl.memory.ema import _hits, ema_update, restore_randomly, share_frozen


def tensors(seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in ((3, 4), (5,), (), (2, 1, 3))]


def test_ema_follows_the_formula() -> None:
    teacher, student = tensors(0), tensors(1)
    expected = [0.9 * own + 0.1 * other for own, other in zip(teacher, student, strict=True)]
    ema_update(teacher, student, 0.9)
    assert all((own - other).abs().max() < 1e-15 for own, other in zip(teacher, expected, strict=True))
    assert all(torch.equal(own, other) for own, other in zip(student, tensors(1), strict=True))


def test_equal_weights_stay_exactly_equal() -> None:
    teacher, student = tensors(0), tensors(0)
    for _ in range(10):
        ema_update(teacher, student, 0.999)
    assert all(torch.equal(own, other) for own, other in zip(teacher, student, strict=True))
    ema_update(teacher, teacher, 0.5)  # all shared: nothing to do
    ema_update([], [], 0.5)


def test_different_networks_are_refused() -> None:
    with pytest.raises(InputError, match="different parameters"):
        ema_update([torch.zeros(3)], [torch.zeros(1)], 0.9)
    with pytest.raises(InputError, match="different parameters"):
        ema_update(tensors(0), tensors(0)[:2], 0.9)


@pytest.mark.parametrize("rate", [0.0, 0.01, 0.3, 1.0])
def test_the_expected_fraction_is_restored(rate: float) -> None:
    ours, source = [torch.ones(400, 500), torch.ones(3)], [torch.full((400, 500), 2.0), torch.full((3,), 2.0)]
    restore_randomly(ours, source, rate, torch.Generator().manual_seed(0))
    restored = torch.cat([(own == 2).flatten() for own in ours])
    kept = torch.cat([(own == 1).flatten() for own in ours])
    assert (restored ^ kept).all()
    assert abs(restored.double().mean() - rate) <= 4 * (rate * (1 - rate) / restored.numel()) ** 0.5


def test_every_weight_is_restored_equally_often_and_independently() -> None:
    generator, times = torch.Generator().manual_seed(0), 4000
    hits = torch.stack([_hits(12, 0.2, generator, torch.device("cpu")) for _ in range(times)])
    assert (hits.mean(dim=0) - 0.2).abs().max() < 4 * (0.16 / times) ** 0.5
    together = torch.corrcoef(hits.T) - torch.eye(12)
    assert together.abs().max() < 4.5 / times**0.5


def test_restored_and_kept_weights_are_exact() -> None:
    ours, before, source = tensors(0), tensors(0), tensors(1)
    restore_randomly(ours, source, 0.5, torch.Generator().manual_seed(0))
    for own, kept, origin in zip(ours, before, source, strict=True):
        assert ((own == kept) | (own == origin)).all()


def test_frozen_parameters_are_shared() -> None:
    student = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
    student[0].requires_grad_(False)
    teacher = copy.deepcopy(student)
    share_frozen(teacher, student)
    assert teacher[0].weight is student[0].weight
    assert teacher[1].weight is not student[1].weight
    assert teacher[1].running_mean is not student[1].running_mean
    with torch.no_grad():
        student[1].weight.add_(1)
    ema_update(teacher.parameters(), student.parameters(), 0.5)
    assert torch.equal(teacher[1].weight, torch.full((4,), 1.5))
