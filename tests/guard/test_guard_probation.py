import pytest
import torch

import dpl
from abuse import streams
from dpl.guard.probation import SMALL, TRIAL, Probation


def guarded(method: str) -> dpl.AdaptiveModel:
    return dpl.adapt(streams.network(), method, guard=True)


def feed(model: dpl.AdaptiveModel, images: int, size: int, seed: int = 0) -> None:
    for batch, _ in streams.iid("noise", images, size, seed):
        model(batch)


def by(model: dpl.AdaptiveModel) -> str:
    return str(model.last["guard"]["answered_by"])


def test_only_small_batches_of_a_fresh_model_begin_a_probation() -> None:
    made = Probation()
    assert made.covers(SMALL - 1, fresh=True)
    assert not made.covers(SMALL, fresh=True)
    assert not made.covers(SMALL - 1, fresh=False)
    assert made.count(2, 0.0) == "stand_back"
    assert made.covers(SMALL - 1, fresh=False), "what has begun goes on"
    assert not made.covers(SMALL, fresh=False)


@pytest.mark.parametrize(("regret", "trusted"), [(-0.03, True), (-0.004, False), (0.0, False), (0.03, False)])
def test_a_gain_over_enough_rows_is_asked_for(regret: float, trusted: bool) -> None:
    made = Probation()
    changes = [made.count(4, regret) for _ in range(TRIAL // 4)]
    assert changes == ["stand_back"] + [None] * (len(changes) - 2) + ["trust" if trusted else None]
    assert made.covers(1, fresh=True) is not trusted
    made.restart()
    assert made.covers(1, fresh=True), "a model that was put back is tried anew"


def test_small_batches_are_answered_by_the_source_while_the_model_learns_beside_it() -> None:
    model, source = guarded("tent"), streams.network()
    for batch, _ in streams.iid("noise", 40, size=2):
        with torch.no_grad():
            assert torch.equal(model(batch), source(batch))
        assert by(model) == "source"
        assert model.last["updated"]
    assert torch.equal(model.predict(batch), source(batch))
    assert model.guard.counts["stand_back"] == 1, "it is said once"
    assert not any(event.alarm for event in model.guard.events)
    assert not model.guard.frozen


def test_a_model_that_gains_is_trusted_after_its_trial_and_stays_so() -> None:
    model, answered = guarded("shot"), []
    for batch, _ in streams.iid("noise", TRIAL + 4, size=4):
        model(batch)
        answered.append(by(model))
    assert answered == ["source"] * (TRIAL // 4) + ["adapted"]
    assert model.guard.counts["trust"] == 1
    feed(model, 160, size=32, seed=2)
    feed(model, 40, size=4, seed=3)
    assert by(model) == "adapted"
    assert model.guard.counts["stand_back"] == 1


def test_batches_of_changing_size_share_the_work() -> None:
    model = guarded("tent")
    answered = []
    for size in (3, 32, 5, 32, 7, 8):
        feed(model, size, size)
        answered.append(by(model))
    assert answered == ["source", "adapted", "source", "adapted", "source", "adapted"]


def test_a_small_last_batch_is_nothing_special() -> None:
    model = guarded("tent")
    feed(model, 16 + 3, size=16)
    assert by(model) == "adapted"
    assert model.guard.counts["stand_back"] == 0


def test_a_reset_model_is_put_on_probation_again() -> None:
    model = guarded("shot")
    feed(model, TRIAL + 4, size=4)
    assert by(model) == "adapted"
    model.reset()
    feed(model, 4, size=4)
    assert by(model) == "source"
