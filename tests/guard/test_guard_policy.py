from dpl.guard import GuardSettings
from dpl.guard.policy import FREEZE, RESET, ROLL_BACK, Ladder


def ladder(**settings: int) -> Ladder:
    return Ladder(GuardSettings(**settings))


def settled() -> Ladder:
    made = ladder()
    made.let_pass(4096)
    return made


def test_a_fresh_model_that_fails_is_frozen_at_once() -> None:
    assert list(ladder().climb(has_healthy_state=False)) == [FREEZE]


def test_a_settled_model_is_first_rolled_back() -> None:
    assert next(settled().climb(True)) == ROLL_BACK


def test_without_a_healthy_state_it_is_reset() -> None:
    assert next(settled().climb(False)) == RESET


def test_trouble_that_returns_soon_climbs() -> None:
    made = settled()
    taken = []
    for _ in range(3):
        taken.append(next(made.climb(True)))
        made.let_pass(100)
    assert taken == [ROLL_BACK, RESET, FREEZE]
    assert made.frozen


def test_old_trouble_is_forgotten() -> None:
    made = settled()
    next(made.climb(True))
    made.let_pass(4096)
    assert next(made.climb(True)) == ROLL_BACK


def test_one_batch_can_go_all_the_way() -> None:
    made = settled()
    assert list(made.climb(True)) == [ROLL_BACK, RESET, FREEZE]
    assert made.frozen


def test_each_freeze_lasts_twice_as_long_up_to_a_limit() -> None:
    made, waits = ladder(freeze_rows=10), []
    for _ in range(9):
        made.freeze()
        waits.append(made.waiting)
        made.thaw()
    assert waits == [10, 20, 40, 80, 160, 320, 640, 640, 640]
    made.let_pass(4 * 4096)
    made.freeze()
    assert made.waiting == 10


def test_what_was_lost_slowly_is_not_tried_again_soon() -> None:
    made = ladder(freeze_rows=10)
    assert list(made.climb(False, slowly=True)) == [FREEZE]
    assert made.waiting == 80


def test_standing_back_has_no_wait_and_counts_as_no_freeze() -> None:
    made = ladder(few_class_rows=10)
    assert [made.see_classes(True, False, 60) for _ in range(2)] == [None, "hold"]
    made.stand_back()
    assert made.frozen
    assert not made.holding
    assert (made.waiting, made.freezes) == (0, 0)


def test_a_freeze_is_waited_out() -> None:
    made = ladder(freeze_rows=10)
    made.freeze()
    made.let_pass(6)
    assert made.waiting == 4
    made.let_pass(6)
    assert made.waiting == 0
    assert made.frozen


def test_learning_is_held_after_patience_and_released() -> None:
    made = ladder(few_class_rows=100)
    seen = [made.see_classes(poor, False, 60) for poor in (True, False, True, True, True, True)]
    assert seen == [None, None, None, None, "hold", None]
    assert made.holding
    assert made.see_classes(False, False, 1) == "release"
    assert not made.holding


def test_a_stretch_that_adaptation_enriches_is_learnt_from_and_forgotten_when_it_ends() -> None:
    made = ladder(few_class_rows=100)
    assert [made.see_classes(True, True, 60) for _ in range(5)] == [None] * 5
    assert made.see_classes(False, True, 60) == "forget"
    assert made.see_classes(False, False, 60) is None
    assert made.see_classes(True, False, 60) is None
    assert made.see_classes(False, False, 60) is None
