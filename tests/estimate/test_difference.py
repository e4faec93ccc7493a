"""The difference between two models without labels: equal to its definition, bounded, and right in plain cases."""

import math

import pytest
import torch
from torch import Tensor

from dpl.estimate import EstimateSettings
from dpl.estimate.difference import Comparison, compared
from dpl.estimate.signals import Window
from dpl.methods.parts.norm_rules import UNKNOWN


def compare(window: Window, rows: int, memory: int, shift: float = UNKNOWN) -> Comparison:
    numbers = compared(window, rows, memory, torch.tensor(shift)).tolist()
    return Comparison.read(min(rows, len(window)), numbers, EstimateSettings())


def by_hand(window: Window, rows: int, memory: int) -> float:
    """The formula of the module's docstring, row by row."""
    total, width = len(window), window.source.shape[1]
    last = range(total - rows, total)
    counted = range(max(0, total - max(rows, memory)), total)
    source, adapted = window.source.argmax(dim=1).tolist(), window.adapted.argmax(dim=1).tolist()

    def classes(predicted: list[int], rows: range = counted) -> float:
        shares = [sum(predicted[i] == k for i in rows) / len(rows) for k in range(width)]
        return math.exp(-sum(p * math.log(p) for p in shares if p > 0))

    firm = sum(int(window.adapted_firm[i]) - int(window.source_firm[i]) for i in last) / rows
    parts = counted, range(max(0, total - max(rows, 32)), total)
    if firm > 0:
        firm *= min(1.0, *(classes(adapted, part) / classes(source, part) for part in parts))
    found = firm + 0.5 * min((classes(adapted, p) - classes(source, p)) / min(width, len(p)) for p in parts)
    most = sum(source[i] != adapted[i] for i in last) / rows
    return max(-most, min(most, found))


def window(rows: int, classes: int, seed: int, alike: float = 1.0) -> Window:
    g = torch.Generator().manual_seed(seed)
    source = torch.randn(rows, classes, generator=g)
    adapted = source + alike * torch.randn(rows, classes, generator=g)
    return seen(source, adapted, *(torch.rand(rows, generator=g) < 0.8 for _ in range(2)))


def seen(source: Tensor, adapted: Tensor, source_firm: Tensor, adapted_firm: Tensor, early: float = 0.0) -> Window:
    """A window of batches whose images look alike to the early layers alone, but not to the adapted model."""
    rows = len(source)
    return Window(source, adapted, source_firm, adapted_firm, torch.full((rows,), 0.1), torch.full((rows,), early))


@pytest.mark.parametrize(("rows", "memory"), [(1, 8), (32, 128), (200, 128), (200, 300)])
@pytest.mark.parametrize("classes", [2, 10, 500])
def test_it_equals_its_definition(rows: int, memory: int, classes: int) -> None:
    for seed in range(4):
        both = window(220, classes, seed, alike=0.2 + seed)
        assert compare(both, rows, memory).difference == pytest.approx(by_hand(both, rows, memory))


def one_hot(predicted: Tensor) -> Tensor:
    return torch.nn.functional.one_hot(predicted, 10).float()


def test_equal_predictions_show_no_difference() -> None:
    both = window(100, 10, 0)
    twin = seen(both.source, 5 * both.source, torch.zeros(100), torch.ones(100))
    assert compare(twin, 100, 100).difference == 0


def test_a_collapse_to_one_class_counts_against_the_model_although_it_is_firm() -> None:
    many, one = one_hot(torch.arange(100) % 10), one_hot(torch.zeros(100, dtype=torch.long))
    found = compare(seen(many, one, torch.arange(100) < 60, torch.ones(100)), 100, 100)
    assert (found.classes, found.source_classes) == (pytest.approx(1), pytest.approx(10))
    assert found.difference == pytest.approx(0.4 / 10 - 0.5 * 9 / 10)


def test_many_classes_that_are_not_firm_do_not_count_for_the_model() -> None:
    many, one = one_hot(torch.arange(100) % 10), one_hot(torch.zeros(100, dtype=torch.long))
    found = compare(seen(one, many, torch.ones(100), torch.arange(100) < 40), 100, 100)
    assert found.difference == pytest.approx(-0.6 + 0.5 * 0.9)


def test_where_nothing_has_shifted_every_other_prediction_counts_as_lost() -> None:
    both = window(200, 10, 0)
    better = seen(both.source, both.adapted, torch.zeros(200), torch.ones(200))
    found, home = compare(better, 200, 200, shift=0.1), compare(better, 200, 200, shift=0.01)
    assert found.difference > 0 > home.difference == -home.disagreement
    assert (found.shift, home.shift) == (pytest.approx(0.1), pytest.approx(0.01))
    assert compare(better, 200, 200).shift is None, "a network without BatchNorm does not tell"


def test_where_late_batch_statistics_hide_that_a_batch_is_not_mixed_every_other_prediction_counts_as_lost() -> None:
    both = window(200, 10, 0)
    mixed, of_one_class = (
        compare(seen(both.source, both.adapted, torch.zeros(200), torch.ones(200), early), 200, 200)
        for early in (0.16, 0.3)
    )
    assert (mixed.mixed, of_one_class.mixed) == (True, False)
    assert mixed.difference > 0
    assert of_one_class.difference == -of_one_class.disagreement
