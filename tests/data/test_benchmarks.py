"""Benchmarks by name: spelling, options, and a root that is not there."""

import pytest

from dpl.core.errors import DataError, SettingError
from dpl.data import list_benchmarks, open_benchmark


def test_names_are_forgiving_and_unknown_ones_are_not(tmp_path):
    with pytest.raises(SettingError, match="Did you mean 'office_home'"):
        open_benchmark("ofice_home", tmp_path)
    for name in ("CIFAR-10-C", "cifar10c", "TerraIncognita", "DomainNet-126", "Office Home"):
        with pytest.raises(DataError, match="was not found here"):
            open_benchmark(name, tmp_path)
    assert len(list_benchmarks()) == 16


def test_an_unknown_option_names_the_nearest(tmp_path):
    with pytest.raises(SettingError, match=r"cifar10_c has no option 'severitty'\. Did you mean 'severity'"):
        open_benchmark("cifar10_c", tmp_path, severitty=5)
    with pytest.raises(SettingError, match="pacs has no option 'severity'"):
        open_benchmark("pacs", tmp_path, severity=5)


@pytest.mark.parametrize("name", list_benchmarks())
def test_a_missing_root_prints_the_layout(tmp_path, name):
    with pytest.raises(DataError) as caught:
        open_benchmark(name, tmp_path / "none")
    message = str(caught.value)
    assert "no such folder" in message
    assert "\nexpected:\n  " in message
