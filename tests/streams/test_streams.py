"""Streams: every protocol delivers what its definition in docs/protocols.md promises, for any labels and seed."""

import random
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpl.core.errors import SettingError
from dpl.streams import PROTOCOLS, Domain, Segment, batches, domainbed_split, plan, seed_hash

DOCS = Path(__file__).parents[2] / "docs" / "protocols.md"
CORRELATED = [name for name, protocol in PROTOCOLS.items() if protocol.correlated]

labels_of_a_domain = st.lists(st.integers(0, 6), min_size=1, max_size=40)
seeds = st.integers(0, 2**40)
quick = settings(deadline=None, max_examples=30)  # a busy machine must not fail a correct plan
deltas = st.one_of(st.none(), st.floats(1e-9, 1e9), st.sampled_from([1e-9, 0.01, 0.1, 1.0, 1e9]))


def corruptions(labels: Sequence[int], names: Sequence[str] = ("fog", "snow")) -> list[Domain]:
    return [Domain(name, labels, severity) for name in names for severity in range(1, 6)]


def settings_for(protocol: str, delta: float | None = None) -> dict[str, Any]:
    chosen = PROTOCOLS[protocol]
    return {
        "delta": delta if chosen.correlated else None,
        "visits": 3 if chosen.walk == "recurring" else None,
    }


def rows(segment: Segment) -> list[tuple[int, int]]:
    return [(int(domain), int(sample)) for domain, sample in segment.indices]


def labels_in_order(segment: Segment, domains: Sequence[Domain]) -> list[int]:
    lookup = {(i, sample): int(label) for i, domain in enumerate(domains) for sample, label in enumerate(domain.labels)}
    return [lookup[row] for row in rows(segment)]


def members(segment: Segment, domains: Sequence[Domain]) -> list[int]:
    if segment.name.startswith("mixed"):
        return [i for i, domain in enumerate(domains) if domain.severity == segment.severity]
    return [i for i, domain in enumerate(domains) if domain.title == segment.name]


@pytest.mark.parametrize("protocol", PROTOCOLS)
@quick
@given(labels=labels_of_a_domain, seed=seeds, delta=deltas)
def test_every_sample_arrives_exactly_once_per_visit(
    protocol: str, labels: list[int], seed: int, delta: float | None
) -> None:
    domains = corruptions(labels)
    segments = plan(protocol, domains, seed=seed, **settings_for(protocol, delta))
    assert len({(segment.name, segment.visit) for segment in segments}) == len(segments)
    for segment in segments:
        expected = Counter((i, j) for i in members(segment, domains) for j in range(len(labels)))
        assert Counter(rows(segment)) == expected
    assert {i for segment in segments for i, _ in rows(segment)} == set(range(len(domains)))


@pytest.mark.parametrize("order", ["numpy", "python"])
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_seed_gives_its_stream_again_and_another_seed_another(protocol: str, order: str) -> None:
    domains = corruptions(list(range(5)) * 8)
    extra = settings_for(protocol)
    first, again, other = (plan(protocol, domains, seed=s, order=order, **extra) for s in (3, 3, 4))
    for one, two, three in zip(first, again, other, strict=True):
        assert rows(one) == rows(two)
        assert rows(one) != rows(three)


@pytest.mark.parametrize("order", ["numpy", "python"])
@pytest.mark.parametrize("protocol", CORRELATED)
@quick
@given(labels=labels_of_a_domain, seed=seeds)
def test_without_delta_classes_arrive_sorted(protocol: str, order: str, labels: list[int], seed: int) -> None:
    domains = corruptions(labels)
    for segment in plan(protocol, domains, seed=seed, order=order):
        arrived = labels_in_order(segment, domains)
        assert arrived == sorted(arrived)


def test_within_a_class_the_sorted_order_is_shuffled() -> None:
    [segment] = plan("correlated", [Domain("fog", [0] * 50)], seed=1)
    assert rows(segment) != sorted(rows(segment))


def changes(labels: Sequence[int]) -> int:
    return sum(a != b for a, b in pairwise(labels))


def test_delta_sets_how_long_a_class_stays() -> None:
    domain = Domain("fog", list(range(10)) * 100)
    counts = []
    for delta in (1e-6, 0.1, 1.0, 100.0):
        [segment] = plan("correlated", [domain], seed=5, delta=delta)
        counts.append(changes(labels_in_order(segment, [domain])))
    assert counts[0] <= 2 * 10  # hardly more than the nine changes of the sorted order
    assert counts == sorted(counts)
    assert counts[-1] > 90  # ten slots with all ten classes in each


@quick
@given(sizes=st.lists(st.integers(1, 3), min_size=1, max_size=60), seed=seeds, delta=st.floats(1e-9, 1e9))
def test_dirichlet_ends_for_sets_with_hardly_any_samples(sizes: list[int], seed: int, delta: float) -> None:
    labels = [7 * c for c, size in enumerate(sizes) for _ in range(size)]  # gaps: classes that never occur
    [segment] = plan("correlated", [Domain("tiny", labels)], seed=seed, delta=delta)
    assert sorted(rows(segment)) == [(0, j) for j in range(len(labels))]


def test_resets() -> None:
    domains = corruptions([0, 1, 2])
    for name, protocol in PROTOCOLS.items():
        resets = [segment.reset_before for segment in plan(name, domains, **settings_for(name))]
        assert resets == [protocol.reset == "each" or i == 0 for i in range(len(resets))], name


def test_continual_keeps_the_order_of_domains() -> None:
    domains = corruptions([0, 1], names=("snow", "fog"))
    segments = plan("continual", domains)
    assert [segment.name for segment in segments] == [domain.title for domain in domains]
    assert [segment.severity for segment in segments] == [1, 2, 3, 4, 5] * 2


def test_gradual_climbs_and_falls_for_each_domain() -> None:
    ladder = [1, 2, 3, 4, 5, 4, 3, 2, 1]
    segments = plan("gradual", corruptions([0, 1]))
    assert [segment.severity for segment in segments] == ladder * 2
    assert [segment.name for segment in segments] == [f"{n}@{s}" for n in ("fog", "snow") for s in ladder]
    assert [segment.visit for segment in segments] == [0, 0, 0, 0, 0, 1, 1, 1, 1] * 2
    assert [segment.severity for segment in plan("gradual", corruptions([0, 1])[::-1])] == ladder * 2


def test_mixed_domains_makes_one_stream_per_severity() -> None:
    domains = [Domain(name, [0, 1] * 20, severity) for severity in (5, 3) for name in ("fog", "snow", "frost")]
    segments = plan("mixed_domains", domains, seed=2)
    assert [(segment.name, len(segment)) for segment in segments] == [("mixed@5", 120), ("mixed@3", 120)]
    assert changes([row[0] for row in rows(segments[0])]) > 40  # domains really alternate
    assert plan("mixed_domains", [Domain("art", [0]), Domain("photo", [1])])[0].name == "mixed"


def test_recurring_comes_back_in_a_new_order() -> None:
    domains = [Domain("day", [0, 1] * 20), Domain("night", [0, 1] * 20)]
    segments = plan("recurring", domains, seed=1, visits=4)
    assert [(s.name, s.visit) for s in segments] == [(n, v) for v in range(4) for n in ("day", "night")]
    assert len({tuple(rows(segment)) for segment in segments}) == len(segments)
    assert rows(plan("continual", domains, seed=1)[0]) == rows(segments[0])


def test_the_order_of_a_domain_does_not_depend_on_the_other_domains() -> None:
    fog, snow = Domain("fog", range(50), 5), Domain("snow", range(50), 5)
    alone = plan("continual", [snow], seed=9)[0].indices[:, 1]
    beside = plan("continual", [fog, snow], seed=9)
    assert np.array_equal(alone, beside[1].indices[:, 1])
    assert not np.array_equal(beside[0].indices[:, 1], beside[1].indices[:, 1])


def test_the_order_of_a_seed_never_changes() -> None:
    [segment] = plan("continual", [Domain("fog", [0] * 8, 5)], seed=0)
    assert segment.indices[:, 1].tolist() == [3, 2, 7, 0, 6, 1, 5, 4]
    [segment] = plan("correlated", [Domain("fog", [0, 1, 2, 3] * 3, 5)], seed=0, delta=0.5)
    assert segment.indices[:, 1].tolist() == [1, 6, 9, 7, 11, 3, 2, 10, 5, 8, 0, 4]


def test_python_order_is_the_shuffle_of_a_freshly_seeded_list() -> None:
    domains = [Domain("fog", [0] * 1000, 5), Domain("snow", [0] * 1000, 5)]
    random.seed(1)
    expected = list(range(1000))
    random.shuffle(expected)
    for segment in plan("continual", domains, seed=1, order="python"):
        assert segment.indices[:, 1].tolist() == expected


def test_python_order_mixes_the_concatenated_domains_and_sorts_stably() -> None:
    domains = [Domain("fog", [1, 0, 1, 0, 2]), Domain("snow", [0, 2, 1])]
    pairs = [(0, j, y) for j, y in enumerate([1, 0, 1, 0, 2])] + [(1, j, y) for j, y in enumerate([0, 2, 1])]
    random.seed(7)
    random.shuffle(pairs)
    [mixed] = plan("mixed_domains", domains, seed=7, order="python")
    assert rows(mixed) == [pair[:2] for pair in pairs]
    pairs.sort(key=lambda pair: pair[2])
    [correlated] = plan("mixed_domains_correlated", domains, seed=7, order="python")
    assert rows(correlated) == [pair[:2] for pair in pairs]


@quick
@given(size=st.integers(1, 60), batch_size=st.integers(1, 70))
def test_batches_cover_the_segment_in_order(size: int, batch_size: int) -> None:
    [segment] = plan("continual", [Domain("fog", [0] * size)])
    parts = list(batches(segment, batch_size))
    assert all(len(part) == batch_size for part in parts[:-1])
    assert [tuple(row) for part in parts for row in part.tolist()] == rows(segment)


def test_seed_hash_vectors() -> None:
    assert [seed_hash(0, i) for i in range(4)] == [894182419, 1514274641, 1325548499, 1796103049]
    assert [seed_hash(10, i) for i in range(4)] == [1049727182, 817617492, 736826616, 876207275]


def test_domainbed_split_vectors() -> None:
    split = domainbed_split(2048, domain_index=0, trial_seed=0)
    assert split.outside[:8].tolist() == [548, 677, 1997, 977, 1553, 1123, 1936, 1520]
    assert (len(split.inside), len(split.outside)) == (1639, 409)


@pytest.mark.parametrize(("index", "size", "inside", "steps"), [(1, 2344, 1876, 59), (3, 3929, 3144, 99)])
def test_in_split_of_pacs_gives_the_batch_counts_of_figure_1(index: int, size: int, inside: int, steps: int) -> None:
    domain = Domain("target", np.zeros(size, int)[domainbed_split(size, domain_index=index).inside])
    [segment] = plan("reset_each_shift", [domain])
    assert (len(segment), len(list(batches(segment, 32)))) == (inside, steps)


@quick
@given(size=st.integers(1, 300), index=st.integers(0, 5), trial=st.integers(0, 100), share=st.floats(0, 1))
def test_domainbed_split_parts_a_domain(size: int, index: int, trial: int, share: float) -> None:
    split = domainbed_split(size, domain_index=index, trial_seed=trial, holdout=share)
    assert len(split.outside) == int(size * share)
    assert sorted([*split.inside, *split.outside]) == list(range(size))


FOG = Domain("fog", [0, 1])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"protocol": "continous"}, "unknown protocol 'continous'. Did you mean 'continual'"),
        ({"order": "pyton"}, "order='pyton': expected one of 'numpy', 'python'"),
        ({"seed": -1}, "seed must be a whole number of at least 0, got -1"),
        ({"seed": 0.5}, "seed must be a whole number"),
        ({"seed": True}, "seed must be a whole number"),
        ({"domains": []}, "domains is empty"),
        ({"domains": [FOG, FOG]}, "given more than once: fog"),
        ({"delta": 0.1}, "delta is for correlated protocols; 'continual' is not one"),
        ({"protocol": "correlated", "delta": 0}, "delta=0: expected a number from 1e-09 to 1000000000.0"),
        ({"protocol": "correlated", "delta": float("nan")}, "delta=nan: expected a number"),
        ({"protocol": "correlated", "delta": "small"}, "delta='small' .str.: expected a number"),
        ({"protocol": "correlated", "delta": 0.1, "order": "python"}, "delta needs order='numpy'"),
        ({"deltas": 2}, "a stream has no setting 'deltas'. Did you mean 'delta'"),
        ({"visits": 2}, "visits is for 'recurring' only"),
        ({"protocol": "recurring"}, "visits must be given for 'recurring'"),
        ({"protocol": "recurring", "visits": 0}, "visits=0: expected a whole number of at least 1"),
        ({"protocol": "gradual"}, "missing or extra: fog@1, fog@2, fog@3, fog@4, fog@5, fog@None"),
        ({"protocol": "gradual", "domains": [*corruptions([0]), Domain("fog", [0], 6)]}, "extra: fog@6"),
    ],
)
def test_wrong_settings_are_named(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingError, match=message):
        plan(**{"protocol": "continual", "domains": [FOG], **arguments})


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Domain("", [0]), "name of a domain must be a non-empty string"),
        (lambda: Domain("fog", []), "labels of domain 'fog' must be a non-empty vector of integers"),
        (lambda: Domain("fog", [0.5]), "labels of domain 'fog' must be .* got shape \\(1,\\) of float64"),
        (lambda: Domain("fog", [[0]]), "got shape \\(1, 1\\)"),
        (lambda: Domain("fog", [0], severity=-1), "severity of domain 'fog' must be a whole number"),
        (lambda: batches(plan("continual", [FOG])[0], 0), "batch_size must be a whole number of at least 1"),
        (lambda: domainbed_split(10, domain_index=0, holdout=2), "holdout must be a fraction from 0 to 1"),
        (lambda: domainbed_split(0, domain_index=0), "size must be a whole number of at least 1"),
    ],
)
def test_wrong_values_are_named(build: Any, message: str) -> None:
    with pytest.raises(SettingError, match=message):
        build()


def test_the_documentation_defines_every_protocol() -> None:
    text = DOCS.read_text(encoding="utf-8")
    for name, protocol in PROTOCOLS.items():
        assert f"| `{name}` | {protocol.summary} |" in text


def test_a_long_tailed_stream_has_the_wanted_imbalance():
    labels = np.repeat(np.arange(5), 80)
    [segment] = plan("reset_each_shift", [Domain("a", labels)], seed=3, imbalance=16)
    counts = np.bincount(labels[segment.indices[:, 1]], minlength=5)
    assert sorted(counts) == [5, 10, 20, 40, 80]
    assert len(np.unique(segment.indices[:, 1])) == len(segment)
    [other] = plan("reset_each_shift", [Domain("a", labels)], seed=4, imbalance=16)
    assert not np.array_equal(counts, np.bincount(labels[other.indices[:, 1]], minlength=5))


def test_imbalance_keeps_the_order_of_the_protocol():
    labels = np.repeat(np.arange(4), 20)
    [segment] = plan("reset_each_shift_correlated", [Domain("a", labels)], imbalance=4)
    assert (np.diff(labels[segment.indices[:, 1]]) >= 0).all()


def test_imbalance_of_one_keeps_a_balanced_stream_and_less_is_refused():
    labels = np.repeat(np.arange(4), 20)
    [plain] = plan("reset_each_shift", [Domain("a", labels)])
    [same] = plan("reset_each_shift", [Domain("a", labels)], imbalance=1)
    assert np.array_equal(plain.indices, same.indices)
    with pytest.raises(SettingError, match=r"imbalance=0\.5: expected a number of at least 1"):
        plan("reset_each_shift", [Domain("a", labels)], imbalance=0.5)


def test_outliers_are_mixed_into_every_segment_and_disturb_no_order():
    domains = [Domain("a", np.zeros(40, int)), Domain("b", np.zeros(40, int))]
    plain = plan("continual", domains, seed=1)
    mixed = plan("continual", domains, seed=1, outliers=Domain("outliers", [-1] * 10))
    for before, after in zip(plain, mixed, strict=True):
        is_outlier = after.indices[:, 0] == 2
        assert is_outlier.sum() == 10
        assert 0 < np.flatnonzero(is_outlier).mean() < 49
        assert np.array_equal(after.indices[~is_outlier], before.indices)
