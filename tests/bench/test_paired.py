"""Paired differences have the interval of their pairs, and the page of the default is drawn from its stored runs."""

import sys
from pathlib import Path

import pandas as pd
import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

import default_study  # noqa: E402
from paired import by_label, difference, estimate  # noqa: E402


def rows(**labels: list[float]) -> pd.DataFrame:
    """Return one line for each label and stream, of one seed."""
    lines = [
        {"section": "a", "column": str(stream), "seed": 0, "label": label, "accuracy": value}
        for label, values in labels.items()
        for stream, value in enumerate(values)
    ]
    return pd.DataFrame(lines)


def test_a_constant_difference_has_no_width() -> None:
    found = difference(by_label(rows(x=[1.0, 20.0, 60.0], y=[0.0, 19.0, 59.0])), "x", "y")
    assert (found.mean, found.low, found.high, found.pairs, found.smallest) == pytest.approx((1, 1, 1, 3, 0))
    assert found.is_clear


def test_a_difference_of_changing_sign_is_not_clear() -> None:
    found = difference(by_label(rows(x=[1.0, 0.0, 3.0, 0.0], y=[0.0, 2.0, 0.0, 2.0])), "x", "y")
    assert found.low < 0 < found.high
    assert not found.is_clear


def of_streams(*streams: list[float]) -> pd.Series:
    """Return paired values with a stream and a seed each."""
    values = {(f"stream {i}", seed): value for i, stream in enumerate(streams) for seed, value in enumerate(stream)}
    return pd.Series(values)


def test_seeds_of_one_stream_do_not_count_as_streams() -> None:
    agreeing = estimate(of_streams([1.0] * 3, [2.0] * 3, [3.0] * 3, [4.0] * 3))
    mixed = estimate(of_streams(*[[1.0, 4.0, 2.5]] * 4))
    assert agreeing.mean == mixed.mean == pytest.approx(2.5)
    assert agreeing.high - agreeing.low > 1.3 * (mixed.high - mixed.low)


def test_few_pairs_have_the_interval_of_student() -> None:
    found = estimate(of_streams([1.0, 2.0, 3.0]))
    assert (found.low, found.high) == pytest.approx((2 - 4.303 / 3**0.5, 2 + 4.303 / 3**0.5), abs=1e-3)


def test_only_streams_of_both_count_and_none_is_an_error() -> None:
    values = by_label(rows(x=[1.0, 2.0, 3.0], y=[0.0]))
    assert difference(values, "x", "y").pairs == 1
    with pytest.raises(ValueError, match="no stream in common"):
        difference(values.assign(z=float("nan")), "x", "z")


def test_the_page_of_the_default_is_that_of_its_stored_runs() -> None:
    assert default_study.PAGE.read_text() == default_study.write(pd.read_csv(default_study.DATA))
