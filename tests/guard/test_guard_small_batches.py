import pytest
import torch

import dpl
from abuse import streams
from dpl.guard.policy import REASONS, SMALL_BATCH, TRIAL_ROWS, SmallBatchTrial


def guarded(method: str) -> dpl.AdaptiveModel:
    return dpl.adapt(streams.network(), method, guard=True)


def feed(model: dpl.AdaptiveModel, images: int, size: int, seed: int = 0) -> None:
    for batch, _ in streams.iid("noise", images, size, seed):
        model(batch)


def by(model: dpl.AdaptiveModel) -> str:
    return str(model.last["guard"]["answered_by"])


def test_only_small_batches_of_a_fresh_model_start_a_trial() -> None:
    made = SmallBatchTrial()
    assert made.covers(SMALL_BATCH - 1, fresh=True)
    assert not made.covers(SMALL_BATCH, fresh=True)
    assert not made.covers(SMALL_BATCH - 1, fresh=False)
    assert made.count(2, 0.0) == "trial_started"
    assert made.covers(SMALL_BATCH - 1, fresh=False), "a started trial continues"
    assert not made.covers(SMALL_BATCH, fresh=False)


@pytest.mark.parametrize(("regret", "passes"), [(-0.03, True), (-0.004, False), (0.0, False), (0.03, False)])
def test_a_trial_requires_a_gain_over_enough_images(regret: float, passes: bool) -> None:
    made = SmallBatchTrial()
    changes = [made.count(4, regret) for _ in range(TRIAL_ROWS // 4)]
    assert changes == ["trial_started"] + [None] * (len(changes) - 2) + ["trial_passed" if passes else None]
    assert made.covers(1, fresh=True) is not passes
    made.restart()
    assert made.covers(1, fresh=True), "a reset model needs a new trial"


def test_the_source_model_predicts_small_batches_while_the_model_adapts() -> None:
    model, source = guarded("tent"), streams.network()
    for batch, _ in streams.iid("noise", 40, size=2):
        with torch.no_grad():
            assert torch.equal(model(batch), source(batch))
        assert by(model) == "source"
        assert model.last["updated"]
    assert torch.equal(model.predict(batch), source(batch))
    assert model.guard.counts["trial_started"] == 1, "it is reported once"
    assert not any(event.alarm for event in model.guard.events)
    assert not model.guard.frozen


def test_a_model_that_gains_passes_its_trial_for_good() -> None:
    model, answered = guarded("shot"), []
    for batch, _ in streams.iid("noise", TRIAL_ROWS + 4, size=4):
        model(batch)
        answered.append(by(model))
    assert answered == ["source"] * (TRIAL_ROWS // 4) + ["adapted"]
    assert model.guard.counts["trial_passed"] == 1
    feed(model, 160, size=32, seed=2)
    feed(model, 40, size=4, seed=3)
    assert by(model) == "adapted"
    assert model.guard.counts["trial_started"] == 1


def test_in_batches_of_changing_size_the_source_model_predicts_the_small_ones() -> None:
    model = guarded("tent")
    answered = []
    for size in (3, 32, 5, 32, 7, 8):
        feed(model, size, size)
        answered.append(by(model))
    assert answered == ["source", "adapted", "source", "adapted", "source", "adapted"]


def test_a_small_last_batch_starts_no_trial() -> None:
    model = guarded("tent")
    feed(model, 16 + 3, size=16)
    assert by(model) == "adapted"
    assert model.guard.counts["trial_started"] == 0


def test_a_reset_model_needs_a_new_trial() -> None:
    model = guarded("shot")
    feed(model, TRIAL_ROWS + 4, size=4)
    assert by(model) == "adapted"
    model.reset()
    feed(model, 4, size=4)
    assert by(model) == "source"


def test_the_reason_names_the_size_the_gain_and_the_length_of_the_trial() -> None:
    for fact in (f"under {SMALL_BATCH} images", "at least 1 % better", f"over {TRIAL_ROWS} images"):
        assert fact in REASONS["trial_started"]
