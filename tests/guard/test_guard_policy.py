from dpl.guard import GuardSettings
from dpl.guard.policy import FREEZE, RESET, ROLL_BACK, EscalationPolicy


def policy(**settings: int) -> EscalationPolicy:
    return EscalationPolicy(GuardSettings(**settings))


def settled() -> EscalationPolicy:
    made = policy()
    made.count_rows(4096)
    return made


def test_a_new_model_is_frozen_at_the_first_alarm() -> None:
    assert list(policy().escalate(has_healthy_state=False)) == [FREEZE]


def test_an_older_model_with_a_healthy_state_is_rolled_back_first() -> None:
    assert next(settled().escalate(True)) == ROLL_BACK


def test_an_older_model_without_a_healthy_state_is_reset_first() -> None:
    assert next(settled().escalate(False)) == RESET


def test_alarms_in_short_succession_escalate() -> None:
    made = settled()
    taken = []
    for _ in range(3):
        taken.append(next(made.escalate(True)))
        made.count_rows(100)
    assert taken == [ROLL_BACK, RESET, FREEZE]
    assert made.frozen


def test_an_alarm_long_after_the_last_one_starts_with_a_rollback() -> None:
    made = settled()
    next(made.escalate(True))
    made.count_rows(4096)
    assert next(made.escalate(True)) == ROLL_BACK


def test_one_batch_can_lead_to_rollback_reset_and_freeze() -> None:
    made = settled()
    assert list(made.escalate(True)) == [ROLL_BACK, RESET, FREEZE]
    assert made.frozen


def test_each_freeze_lasts_twice_as_long_up_to_a_limit() -> None:
    made, waits = policy(freeze_rows=10), []
    for _ in range(9):
        made.freeze()
        waits.append(made.rows_to_wait)
        made.unfreeze()
    assert waits == [10, 20, 40, 80, 160, 320, 640, 640, 640]
    made.count_rows(4 * 4096)
    made.freeze()
    assert made.rows_to_wait == 10


def test_a_freeze_lasts_longer_if_predictions_were_lost_slowly() -> None:
    made = policy(freeze_rows=10)
    assert list(made.escalate(False, slowly=True)) == [FREEZE]
    assert made.rows_to_wait == 80


def test_serving_the_source_model_has_no_wait_and_counts_as_no_freeze() -> None:
    made = policy(few_class_rows=10)
    assert [made.count_few_class_rows(True, False, 60) for _ in range(2)] == [None, "pause"]
    made.serve_source()
    assert made.frozen
    assert not made.paused
    assert (made.rows_to_wait, made.freezes) == (0, 0)


def test_a_freeze_counts_images_and_does_not_end_by_itself() -> None:
    made = policy(freeze_rows=10)
    made.freeze()
    made.count_rows(6)
    assert made.rows_to_wait == 4
    made.count_rows(6)
    assert made.rows_to_wait == 0
    assert made.frozen


def test_adaptation_pauses_in_a_long_run_of_few_classes_and_resumes() -> None:
    made = policy(few_class_rows=100)
    seen = [made.count_few_class_rows(few, False, 60) for few in (True, False, True, True, True, True)]
    assert seen == [None, None, None, None, "pause", None]
    assert made.paused
    assert made.count_few_class_rows(False, False, 1) == "resume"
    assert not made.paused


def test_a_run_in_which_the_adapted_model_sees_more_classes_is_adapted_to_and_discarded_when_it_ends() -> None:
    made = policy(few_class_rows=100)
    assert [made.count_few_class_rows(True, True, 60) for _ in range(5)] == [None] * 5
    assert made.count_few_class_rows(False, True, 60) == "discard"
    assert made.count_few_class_rows(False, False, 60) is None
    assert made.count_few_class_rows(True, False, 60) is None
    assert made.count_few_class_rows(False, False, 60) is None
