"""Streams on which adapting models fail: the guard keeps them near the model as shipped, and keeps quiet elsewhere."""

import pytest
import torch

from abuse.streams import Batch, correlated, iid, one_class, recurring, runs
from abuse.subjects import Score, adapted, methods, run, source_score

BATCHES = 30


def streams() -> dict[str, list[Batch]]:
    return {
        "correlated": correlated("noise", 32 * BATCHES),
        "runs": runs("shifted", 32 * BATCHES),
        "one_class": one_class("noise", 32 * BATCHES) + iid("noise", 32 * 10),
        "single": iid("noise", 192, size=1),
    }


# Those that fail hardest without the guard, one for each way of failing, and the paper's own method.
TRIED = ["tent", "pl", "lame", "cotta", "shot_im", "dpl"]

# What is lost before the guard acts is a number of answers, not a share: two points of 3,200 images.
MOST_LOST = 64


@pytest.mark.parametrize("stream", list(streams()))
@pytest.mark.parametrize("name", TRIED)
def test_the_guard_does_no_harm(name: str, stream: str) -> None:
    batches = streams()[stream]
    lost = source_score(batches).right - run(adapted(name), batches).right
    assert lost <= (12 if stream == "single" else MOST_LOST)


@pytest.mark.parametrize("stream", ["correlated", "one_class", "single"])
def test_without_the_guard_these_streams_ruin_tent(stream: str) -> None:
    batches = streams()[stream]
    assert run(adapted("tent", guard=False), batches).accuracy < source_score(batches).accuracy - 20


def test_one_class_for_long_is_noticed_and_not_learnt() -> None:
    model, stream = adapted("pl"), one_class("noise", 32 * 40)
    run(model, stream)
    assert model.guard.counts["hold"] + model.guard.counts["freeze"] > 0
    after = iid("noise", 32 * 20)
    assert run(model, after).accuracy >= source_score(after).accuracy - 2


def visit_gaps(model: object, visits: list[list[Batch]]) -> list[float]:
    """Points lost against the source in each visit."""
    return [source_score(batches).accuracy - run(model, batches).accuracy for batches in visits]  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["tent", "dpl", "pl"])
def test_recurring_domains_stay_near_the_source_at_every_visit(name: str) -> None:
    assert max(visit_gaps(adapted(name), recurring(5, 32 * 3))) <= 2


@pytest.mark.parametrize("name", ["tent", "dpl", "norm"])
@pytest.mark.parametrize("shift", ["easy", "noise", "shifted"])
def test_no_false_alarm_and_no_lost_answer_on_ordinary_streams(name: str, shift: str) -> None:
    batches = iid(shift, 16 * 100, size=16)
    guarded, plain = adapted(name), adapted(name, guard=False)
    score, expected = run(guarded, batches), run(plain, batches)
    counts = guarded.guard.counts
    assert counts["roll_back"] + counts["reset"] + counts["freeze"] == 0
    assert score.accuracy >= expected.accuracy - 0.5


@pytest.mark.parametrize("name", methods())
def test_any_batch_size_is_answered(name: str) -> None:
    model, seen = adapted(name), Score()
    for size in (1, 2, 3, 7, 32, 1, 5):
        for images, labels in iid("noise", 2 * size, size=size, seed=size):
            logits = model(images)
            assert logits.shape == (size, 10)
            assert torch.isfinite(logits).all()
            seen.add(logits, labels)
    assert seen.images == 102
