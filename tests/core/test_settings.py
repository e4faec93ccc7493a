"""Settings check their values when they are made, and a class line can change inherited defaults."""

from dataclasses import FrozenInstanceError, dataclass
from typing import Any, Literal

import pytest

from dpl.core.errors import SettingError
from dpl.core.settings import Checked, describe, make_settings, setting, whole_number


@dataclass(frozen=True, kw_only=True)
class Example(Checked):
    owner = "example "

    rate: float = setting(0.1, "Step size", low=0, high=1)
    steps: int = setting(1, "Steps for each batch", low=1)
    limit: float | None = setting(None, "Largest entropy", low=0)
    rows: int | None = setting(None, "Samples to look at; all if not given")
    mode: Literal["mean", "sum"] = setting("mean", "How terms are combined")
    size: int | str = setting("all", "Part of the network", choices=("all", "none", 3))
    quiet: bool = setting(False, "Whether warnings are left out")
    weights: tuple[float, ...] = setting((0.5,), "One weight for each term", high=1)


def test_defaults_are_valid_and_settings_do_not_change() -> None:
    example = Example()
    assert (example.rate, example.limit, example.mode) == (0.1, None, "mean")
    with pytest.raises(FrozenInstanceError):
        example.rate = 0.2  # type: ignore[misc]


@pytest.mark.parametrize(
    "values",
    [
        *({"rate": 0}, {"rate": 1}, {"limit": 2.5}, {"rows": 3}, {"rows": None}, {"mode": "sum"}),
        *({"size": 3}, {"quiet": True}, {"weights": (-1, 1.0)}),
    ],
    ids=str,
)
def test_values_in_range_are_accepted(values: dict[str, Any]) -> None:
    (name, value) = next(iter(values.items()))
    assert getattr(Example(**values), name) == value


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"rate": 1.5}, "example rate=1.5: expected a number from 0 to 1"),
        ({"rate": float("nan")}, "example rate=nan: expected a number from 0 to 1"),
        ({"rate": "fast"}, "example rate='fast' (str): expected a number from 0 to 1"),
        ({"rate": None}, "example rate=None (NoneType): expected a number from 0 to 1"),
        ({"rate": True}, "example rate=True (bool): expected a number from 0 to 1"),
        ({"steps": 0}, "example steps=0: expected a whole number of at least 1"),
        ({"steps": 2.0}, "example steps=2.0 (float): expected a whole number of at least 1"),
        ({"limit": -1}, "example limit=-1: expected a number of at least 0"),
        ({"rows": 2.5}, "example rows=2.5 (float): expected a whole number"),
        ({"rows": "all"}, "example rows='all' (str): expected a whole number"),
        ({"mode": "max"}, "example mode='max': expected one of 'mean', 'sum'"),
        ({"size": 4}, "example size=4: expected one of 'all', 'none', 3"),
        ({"quiet": 1}, "example quiet=1: expected True or False"),
        ({"weights": (0.5, 2.0)}, "example weights=2.0: expected a number of at most 1"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_a_wrong_value_is_named_with_what_is_expected(values: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingError) as caught:
        Example(**values)
    assert str(caught.value) == message


def test_a_class_line_changes_an_inherited_default_and_keeps_its_check() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Tuned(Example, rate=0.5, mode="sum"):
        pass

    assert (Tuned().rate, Tuned().mode, Tuned().steps) == (0.5, "sum", 1)
    assert Example().rate == 0.1
    assert describe(Tuned)[0] == ("rate", 0.5, "Step size")
    with pytest.raises(SettingError, match="rate=2: expected a number from 0 to 1"):
        Tuned(rate=2)


def test_an_unknown_default_in_a_class_line_is_an_error_that_names_the_nearest() -> None:
    with pytest.raises(SettingError, match=r"Wrong inherits no setting 'rat'. .*rate"):

        class Wrong(Example, rat=0.5):
            pass


def test_an_unknown_keyword_is_an_error_that_names_the_nearest() -> None:
    with pytest.raises(SettingError, match=r"dpl has no setting 'stepz'. .*steps"):
        make_settings(Example, "dpl", {"stepz": 2})
    assert make_settings(Example, "dpl", {"steps": 2}) == Example(steps=2)


def test_descriptions_give_name_default_and_meaning() -> None:
    assert describe(Example)[:2] == [("rate", 0.1, "Step size"), ("steps", 1, "Steps for each batch")]


@pytest.mark.parametrize("value", [0, -1, 2.0, "2", None, True])
def test_what_is_no_whole_number_of_the_least_size_is_refused(value: Any) -> None:
    with pytest.raises(SettingError, match="keep must be a whole number of at least 1, got"):
        whole_number("keep", value, 1)


def test_a_whole_number_is_returned() -> None:
    assert whole_number("keep", 1, 1) == 1
