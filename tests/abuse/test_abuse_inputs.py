"""Images that should not be there: not finite, out of range, empty of content, poisoned."""

import pytest
import torch

import dpl
from abuse.endurance import bad_rows_leave_no_trace, spoil
from abuse.scenarios import contentless
from abuse.streams import disturbing, extreme, iid, poisoned
from abuse.subjects import adapted, run, source_score
from dpl.methods import list_methods


@pytest.mark.parametrize("name", list_methods())
def test_bad_rows_leave_no_trace(name: str) -> None:
    bad_rows_leave_no_trace(name, after=2)


def test_without_the_guard_a_batch_with_bad_rows_is_refused_whole() -> None:
    model = adapted("tent", guard=False)
    spoilt, _ = spoil(iid("noise", 32)[0][0])
    with pytest.raises(dpl.InputError, match="non-finite values in rows"):
        model(spoilt)


def test_a_wrong_dtype_is_refused() -> None:
    for dtype in (torch.uint8, torch.int64, torch.float64):
        with pytest.raises(dpl.InputError, match="dtype"):
            adapted("tent")(torch.zeros(4, 3, 16, 16, dtype=dtype))


@pytest.mark.parametrize("name", ["tent", "dpl", "pl"])
def test_empty_images_do_no_lasting_harm(name: str) -> None:
    model = adapted(name)
    run(model, contentless(4))
    after = iid("noise", 32 * 24)
    assert run(model, after).accuracy >= source_score(after).accuracy - 1


@pytest.mark.parametrize("name", ["tent", "norm", "dpl"])
def test_extreme_images_in_every_batch_do_not_reach_the_model(name: str) -> None:
    attacked = poisoned(iid("noise", 32 * 12), 0.05, extreme)
    assert run(adapted(name), attacked).accuracy >= source_score(attacked).accuracy - 2


@pytest.mark.parametrize("name", ["tent", "norm"])
def test_without_the_guard_extreme_images_in_every_batch_do_harm(name: str) -> None:
    """The attack is real: the test above can see the defence."""
    attacked = poisoned(iid("noise", 32 * 12), 0.05, extreme)
    guarded, plain = run(adapted(name), attacked), run(adapted(name, guard=False), attacked)
    assert plain.accuracy < guarded.accuracy - 5


def test_an_attack_within_the_range_costs_little_and_is_overcome() -> None:
    """A twentieth of each batch is made to spoil the others' answers through batch statistics; then it stops."""
    calm = iid("noise", 32 * 20, seed=1)
    attacked = poisoned(iid("noise", 32 * 6), 0.05, disturbing)
    model, untouched = adapted("tent"), adapted("tent")
    during = run(model, attacked)
    assert during.accuracy >= source_score(attacked).accuracy - 5
    run(model, calm)
    again = iid("noise", 32 * 10, seed=2)
    assert run(model, again).accuracy >= run(untouched, again).accuracy - 1


def test_one_tenants_attack_does_not_reach_another() -> None:
    model, other, alone = adapted("tent"), adapted("tent"), adapted("tent")
    for (attacked, _), (calm, _) in zip(
        poisoned(iid("noise", 32 * 4), 0.2, extreme), iid("noise", 32 * 4, seed=1), strict=True
    ):
        model(attacked)
        assert torch.equal(other(calm), alone(calm))
