"""Support sets against slow loops."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dpl.core.errors import InputError, SettingError
from dpl.memory.supports import (
    EMPTY,
    drop_worst_supports,
    insert_supports,
    lowest_in_class,
    nearest_supports,
    rank_in_class,
    support_means,
    support_sums,
    widen_supports,
)

CLASSES = 4
samples = st.lists(st.tuples(st.integers(0, CLASSES - 1), st.integers(0, 6)), min_size=1, max_size=12)


def tensors(batch: list[tuple[int, int]]) -> tuple[Tensor, Tensor]:
    labels, entropies = zip(*batch, strict=True)
    return torch.tensor(labels), torch.tensor(entropies, dtype=torch.float64)


def empty_set(places: int, width: int = 3) -> tuple[Tensor, Tensor]:
    return torch.zeros(CLASSES, places, width), torch.full((CLASSES, places), EMPTY)


def filled_set() -> tuple[Tensor, Tensor]:
    """Class 0 full, class 1 with one support, class 2 with two, class 3 without."""
    features = torch.randn(CLASSES, 3, 5, generator=torch.Generator().manual_seed(0))
    gap = EMPTY
    return features, torch.tensor([[0.3, 0.1, 0.2], [gap, 0.5, gap], [0.9, gap, 0.4], [gap, gap, gap]])


@given(samples)
def test_ranks_count_the_better_ones_of_the_same_class(batch: list[tuple[int, int]]) -> None:
    rank, best = rank_in_class(*tensors(batch))
    for i, (label, value) in enumerate(batch):
        better = [j for j, (c, e) in enumerate(batch) if c == label and (e, j) < (value, i)]
        assert rank[i] == len(better)
        assert best[i] == min((e, j) for j, (c, e) in enumerate(batch) if c == label)[1]


@given(samples, st.integers(1, 4), st.integers(1, 14))
def test_lowest_in_class_equals_a_loop(batch: list[tuple[int, int]], per_class: int, total: int) -> None:
    by_class = [sorted((e, i) for i, (c, e) in enumerate(batch) if c == k)[:per_class] for k in range(CLASSES)]
    wanted = [i for rows in by_class for _, i in rows]
    assert lowest_in_class(*tensors(batch), per_class).tolist() == wanted
    surest = sorted((rank, e, k, i) for k, rows in enumerate(by_class) for rank, (e, i) in enumerate(rows))[:total]
    limited = lowest_in_class(*tensors(batch), per_class, total).tolist()
    assert len(limited) == len(surest)
    assert sorted(batch[i][1] for i in limited) == sorted(e for _, e, _, _ in surest)
    assert limited == [i for i in wanted if i in limited]


def test_lowest_in_class_refuses_to_keep_nothing() -> None:
    with pytest.raises(SettingError, match="per_class=0"):
        lowest_in_class(torch.tensor([0]), torch.tensor([0.0]), 0)


@settings(max_examples=60)
@given(st.lists(samples, min_size=1, max_size=4), st.integers(1, 4))
def test_each_class_holds_its_lowest_entropies(batches: list[list[tuple[int, int]]], places: int) -> None:
    features, held = empty_set(places, width=1)
    seen: list[list[int]] = [[] for _ in range(CLASSES)]
    for batch in batches:
        labels, entropies = tensors(batch)
        insert_supports(features, held, entropies[:, None].float(), labels, entropies)
        for label, value in batch:
            seen[label].append(value)
    for k in range(CLASSES):
        inside = held[k] < EMPTY
        assert sorted(held[k][inside].tolist()) == sorted(seen[k])[:places]
        assert torch.equal(features[k, inside, 0], held[k][inside])  # features travel with their entropies


def test_insertion_keeps_who_was_surest_and_forgets_the_others() -> None:
    generator = torch.Generator().manual_seed(1)
    features, held = empty_set(5, width=2)
    memory: list[list[tuple[float, float]]] = [[] for _ in range(CLASSES)]
    for step in range(20):
        labels = torch.randint(CLASSES, (16,), generator=generator)
        entropies = torch.rand(16, generator=generator)
        names = torch.arange(16.0) + 100 * step
        entered = insert_supports(features, held, names[:, None].expand(-1, 2), labels, entropies)
        for k in range(CLASSES):
            new = [(entropies[i].item(), names[i].item()) for i in range(16) if labels[i] == k]
            kept = sorted(memory[k] + new)[:5]
            inside = held[k] < EMPTY
            assert sorted(zip(held[k][inside].tolist(), features[k, inside, 0].tolist(), strict=True)) == kept
            assert {names[i].item() for i in range(16) if labels[i] == k and entered[i]} == {
                name for pair in kept if pair in new for name in pair[1:]
            }
            memory[k] = kept


def test_the_older_of_equal_entropies_stays_and_what_is_not_finite_never_enters() -> None:
    features, held = empty_set(1)
    first, second = torch.ones(1, 3), torch.full((1, 3), 2.0)
    label = torch.tensor([2])
    assert insert_supports(features, held, first, label, torch.tensor([0.5])).all()
    assert not insert_supports(features, held, second, label, torch.tensor([0.5])).any()
    for value in (torch.nan, torch.inf):
        other = torch.tensor([3])
        assert not insert_supports(features, held, second, other, torch.tensor([value])).any()
    assert torch.equal(features[2], first)


def test_more_samples_of_one_class_than_places() -> None:
    features, held = empty_set(2)
    entropies = torch.tensor([0.9, 0.1, 0.5, 0.3, 0.7])
    entered = insert_supports(features, held, torch.randn(5, 3), torch.ones(5, dtype=torch.int64), entropies)
    assert entered.tolist() == [False, True, False, True, False]
    assert sorted(held[1].tolist()) == pytest.approx([0.1, 0.3])
    assert (held[[0, 2, 3]] == EMPTY).all()


def test_insertion_checks_shapes() -> None:
    features, held = empty_set(2)
    with pytest.raises(InputError, match="new_features"):
        insert_supports(features, held, torch.zeros(2, 7), torch.zeros(2, dtype=torch.int64), torch.zeros(2))
    with pytest.raises(InputError, match=r"expected \[C, K, d\]"):
        insert_supports(features, held[:, :1], torch.zeros(2, 3), torch.zeros(2, dtype=torch.int64), torch.zeros(2))


def test_widening_adds_empty_places_only() -> None:
    features, held = filled_set()
    wide, wide_held = widen_supports(features, held, 5)
    assert torch.equal(wide[:, :3], features)
    assert torch.equal(wide_held[:, :3], held)
    assert (wide_held[:, 3:] == EMPTY).all()
    with pytest.raises(InputError, match="places=2"):
        widen_supports(features, held, 2)


def test_drop_worst_empties_one_place_of_each_class() -> None:
    _, held = filled_set()
    dropped = drop_worst_supports(held)
    gap = EMPTY
    wanted = [[gap, 0.1, 0.2], [gap, gap, gap], [gap, gap, 0.4], [gap, gap, gap]]
    assert torch.equal(dropped, torch.tensor(wanted))


def test_sums_and_means_equal_loops() -> None:
    features, held = filled_set()
    sums, means = support_sums(features, held), support_means(features, held)
    for k in range(CLASSES):
        rows = [features[k, j] for j in range(3) if held[k, j] < EMPTY]
        total = sum((row / row.norm() for row in rows), torch.zeros(5))
        assert torch.allclose(sums[k], total, atol=1e-6)
        assert torch.allclose(means[k], sum(rows, torch.zeros(5)) / max(len(rows), 1), atol=1e-6)
    assert support_means(features.double(), held.double()).dtype == torch.float64


def test_means_are_exact_in_double_precision() -> None:
    features = torch.ones(1, 3, 2, dtype=torch.float64)
    assert torch.allclose(support_means(features, torch.zeros(1, 3)), features[:, 0], rtol=1e-15, atol=0)


def test_nearest_equals_a_loop_and_marks_what_is_missing() -> None:
    features, held = filled_set()
    rows, valid = features.flatten(0, 1), (held < EMPTY).flatten()
    queries = torch.randn(6, 5, generator=torch.Generator().manual_seed(2))
    index, found = nearest_supports(queries, rows, 8, valid)
    assert index.shape == found.shape == (6, 8)
    assert (found.sum(dim=1) == 6).all()
    for i, query in enumerate(queries):
        cosine = {j: torch.cosine_similarity(query, rows[j], dim=0).item() for j in range(12) if valid[j]}
        assert index[i, :6].tolist() == sorted(cosine, key=lambda j: -cosine[j])
    assert nearest_supports(queries, rows[:2], 4)[0].shape == (6, 2)
