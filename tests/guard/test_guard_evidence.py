"""What speaks against a model and for it, summed over comparisons."""

import pytest

from dpl.estimate import Comparison
from dpl.guard import GuardSettings
from dpl.guard.evidence import Evidence


def found(difference: float, rows: int = 32) -> Comparison:
    return Comparison(rows, difference, 1.0, 0.9, 0.9, 5.0, 5.0, 0.1)


def evidence(**settings: float) -> Evidence:
    return Evidence(GuardSettings(**settings))


def test_one_bad_batch_is_enough_and_so_are_many_that_lose_a_little() -> None:
    at_once, slowly = evidence(), evidence()
    at_once.add(found(-0.5))
    assert at_once.shows_harm
    for _ in range(40):
        slowly.add(found(-0.035))
    assert not slowly.shows_harm, "0.5 points beyond the allowance of 1,280 images are less than 8"
    for _ in range(20):
        slowly.add(found(-0.04))
    assert slowly.shows_harm


def test_what_is_within_the_allowance_is_never_counted() -> None:
    made = evidence()
    for _ in range(1000):
        made.add(found(-0.029))
    assert (made.lost, made.gained) == (0.0, 0.0)


def test_a_gain_makes_up_for_an_earlier_loss_and_no_more() -> None:
    made = evidence()
    made.add(found(-0.2))
    made.add(found(0.5))
    assert made.lost == 0.0
    made.add(found(-0.5))
    assert made.shows_harm, "earlier gains are no credit"


@pytest.mark.parametrize("freezes", [1, 2, 3])
def test_every_freeze_doubles_what_a_model_must_gain_or_wait(freezes: int) -> None:
    made = evidence(limit=8, freeze_rows=100)
    for _ in range(freezes):
        made.switch(frozen=False)
        made.switch(frozen=True)
    need = 2 ** (freezes - 1)
    for _ in range(need):
        assert not made.shows_recovery
        made.add(found(0.03 + 8 / 32 + 1e-9))
    assert made.shows_recovery
    made.switch(frozen=False)
    made.switch(frozen=True)
    made.count(100 * 2 * need)
    assert made.shows_recovery, "after a long wait nothing has to be gained"
    made.add(found(-0.2))
    assert not made.shows_recovery


def test_freezes_are_forgotten_after_a_long_time_without_one() -> None:
    made = evidence(forget_after=1000)
    made.switch(frozen=True)
    made.count(2000)
    assert made.freezes == 1, "a frozen model proves nothing"
    made.switch(frozen=False)
    made.count(999)
    assert made.freezes == 1
    made.count(1)
    assert made.freezes == 0
