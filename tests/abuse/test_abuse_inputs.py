"""Images that should not be there: not finite, out of range, empty of content, poisoned."""

import pytest
import torch
from torch import Tensor

import dpl
from abuse.streams import disturbing, extreme, iid, poisoned
from abuse.subjects import adapted, methods, run, source_score


def spoil(images: Tensor) -> tuple[Tensor, list[int]]:
    """Put one image of each bad kind into a batch; return it and the rows that stayed good."""
    images, bad = images.clone(), [0, 5, 11, 31]
    images[0, 0, 0, 0], images[5, 1] = torch.nan, torch.inf
    images[11, 2, 3, 3], images[31] = -torch.inf, 1e20
    return images, [row for row in range(len(images)) if row not in bad]


@pytest.mark.parametrize("name", methods())
def test_bad_rows_leave_no_trace(name: str) -> None:
    model, clean = adapted(name), adapted(name)
    batches = [images for images, _ in iid("noise", 32 * 5)]
    assert torch.equal(model(batches[0]), clean(batches[0]))
    spoilt, good = spoil(batches[1])
    logits = model(spoilt)
    assert torch.equal(logits[good], clean(spoilt[good]))
    assert sorted(model.last["set_aside"]) == [0, 5, 11, 31]
    assert not logits[list(model.last["set_aside"])].any()
    for batch in batches[2:]:
        assert torch.equal(model(batch), clean(batch))
    floats = [value for value in model.state_dict().values() if value.is_floating_point()]
    assert all(torch.isfinite(value).all() for value in floats)


def test_without_the_guard_a_batch_with_bad_rows_is_refused_whole() -> None:
    model = adapted("tent", guard=False)
    spoilt, _ = spoil(iid("noise", 32)[0][0])
    with pytest.raises(dpl.InputError, match="non-finite values in rows"):
        model(spoilt)


def test_a_wrong_dtype_is_refused() -> None:
    for dtype in (torch.uint8, torch.int64, torch.float64):
        with pytest.raises(dpl.InputError, match="dtype"):
            adapted("tent")(torch.zeros(4, 3, 16, 16, dtype=dtype))


CONTENTLESS = {
    "black": torch.zeros(32, 3, 16, 16),
    "white": torch.ones(32, 3, 16, 16),
    "grey": torch.full((32, 3, 16, 16), 0.4),
    "one image": iid("noise", 32)[0][0][:1].expand(32, -1, -1, -1),
}


@pytest.mark.parametrize("name", ["tent", "dpl", "shot_im", "pl", "norm", "t3a", "sar"])
def test_empty_images_do_no_lasting_harm(name: str) -> None:
    model = adapted(name)
    for batch in CONTENTLESS.values():
        for _ in range(4):
            assert torch.isfinite(model(batch.contiguous())).all()
    after = iid("noise", 32 * 24)
    assert run(model, after).accuracy >= source_score(after).accuracy - 1


@pytest.mark.parametrize("name", ["tent", "norm", "dpl", "t3a"])
def test_extreme_images_in_every_batch_do_not_reach_the_model(name: str) -> None:
    stream = iid("noise", 32 * 12)
    attacked = poisoned(stream, 0.05, extreme)
    guarded, plain = run(adapted(name), attacked), run(adapted(name, guard=False), attacked)
    assert guarded.accuracy >= source_score(attacked).accuracy - 2
    if name in ("tent", "norm"):
        assert plain.accuracy < guarded.accuracy - 5, "the attack does nothing: the test cannot see the defence"


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
