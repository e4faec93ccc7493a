"""The contrastive losses against their definitions, written as loops."""

import math

import pytest
import torch
from torch import Tensor

from dpl.core.errors import InputError, SettingError
from dpl.objectives.contrastive import class_aware_info_nce, view_contrast


def cosine(a: Tensor, b: Tensor) -> float:
    return float(a @ b / (a.norm() * b.norm()))


def slow_view_contrast(views: Tensor, temperature: float) -> float:
    vectors = [(v, b) for v in range(views.shape[0]) for b in range(views.shape[1])]
    total = 0.0
    for v, b in vectors:
        others = [pair for pair in vectors if pair != (v, b)]
        weights = {pair: math.exp(cosine(views[v, b], views[pair]) / temperature) for pair in others}
        positives = [pair for pair in others if pair[1] == b]
        total -= sum(math.log(weights[pair] / sum(weights.values())) for pair in positives) / len(positives)
    return total / len(vectors)


@pytest.mark.parametrize("shape", [(3, 5, 4), (2, 3, 6), (3, 1, 4)])
def test_view_contrast_equals_its_definition(shape: tuple[int, int, int]) -> None:
    views = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert view_contrast(views, 0.3).item() == pytest.approx(slow_view_contrast(views, 0.3), abs=1e-12)


def test_view_contrast_is_finite_with_finite_gradients_for_equal_and_zero_vectors() -> None:
    views = torch.zeros(3, 4, 5, requires_grad=True)
    with torch.no_grad():
        views[:, :2] = 1.0
    view_contrast(views, 0.01).backward()
    assert views.grad is not None
    assert views.grad.isfinite().all()


def slow_info_nce(
    queries: Tensor, keys: Tensor, labels: Tensor, queue: Tensor, queue_labels: Tensor, temperature: float
) -> float:
    total = 0.0
    for query, key, label in zip(queries, keys, labels, strict=True):
        positive = math.exp(cosine(query, key) / temperature)
        negatives = [
            math.exp(cosine(query, entry) / temperature)
            for entry, other in zip(queue, queue_labels, strict=True)
            if other != label
        ]
        total -= math.log(positive / (positive + sum(negatives)))
    return total / len(queries)


def example() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    draw = {"generator": generator, "dtype": torch.float64}
    return {
        "queries": torch.randn(5, 4, **draw),
        "keys": torch.randn(5, 4, **draw),
        "labels": torch.tensor([0, 1, 2, 0, 1]),
        "queue": torch.nn.functional.normalize(torch.randn(9, 4, **draw), dim=1),
        "queue_labels": torch.tensor([0, 1, 2, 0, 1, 2, 0, 0, 0]),
    }


def test_info_nce_equals_its_definition() -> None:
    value = class_aware_info_nce(*example().values(), 0.2)
    assert value.item() == pytest.approx(slow_info_nce(*example().values(), 0.2), abs=1e-12)


def test_info_nce_is_zero_where_only_the_own_class_is_queued() -> None:
    given = example() | {"labels": torch.zeros(5, dtype=torch.long), "queue_labels": torch.zeros(9, dtype=torch.long)}
    given["queries"].requires_grad_()
    value = class_aware_info_nce(*given.values(), 0.07)
    value.backward()
    assert value.item() == 0
    assert given["queries"].grad is not None
    assert (given["queries"].grad == 0).all()


def test_wrong_arguments_are_named() -> None:
    with pytest.raises(InputError, match="at least two views"):
        view_contrast(torch.ones(1, 4, 5), 0.1)
    with pytest.raises(SettingError, match="temperature"):
        view_contrast(torch.ones(2, 4, 5), 0.0)
    with pytest.raises(InputError, match="queue"):
        class_aware_info_nce(*(example() | {"queue": torch.ones(9, 3)}).values(), 0.1)
