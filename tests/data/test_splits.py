"""Splits: the published rule, by its own examples."""

import numpy as np
import pytest

from dpl.data import domain_split, seed_hash
from dpl.errors import SettingError


def test_seeds_are_domainbeds():
    assert [seed_hash(0, domain) for domain in range(4)] == [894182419, 1514274641, 1325548499, 1796103049]
    assert [seed_hash(10, domain) for domain in range(4)] == [1049727182, 817617492, 736826616, 876207275]


def test_the_order_is_domainbeds():
    large, small = domain_split(2048, 0, seed=0)
    assert small[:8].tolist() == [548, 677, 1997, 977, 1553, 1123, 1936, 1520]
    assert (len(large), len(small)) == (1639, 409)


def test_parts_are_disjoint_and_complete():
    large, small = domain_split(101, 3, seed=10)
    assert len(small) == 20
    assert np.sort(np.concatenate([large, small])).tolist() == list(range(101))
    assert large.tolist() != domain_split(101, 2, seed=10)[0].tolist()


@pytest.mark.parametrize(("length", "held_out"), [(0, 0.2), (10, 1.0), (10, -0.1)])
def test_impossible_splits(length, held_out):
    with pytest.raises(SettingError, match="held_out"):
        domain_split(length, 0, held_out=held_out)
