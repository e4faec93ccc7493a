import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dpl
from abuse import streams
from dpl.core.errors import InputError, SettingError, SnapshotError
from dpl.guard import GuardEvent, GuardSettings
from nets import CLASSES, images, network


def same(first: dict[str, Any], second: dict[str, Any]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[key], second[key]) for key in first)


def inner(model: dpl.AdaptiveModel) -> dict[str, Tensor]:
    return {key: value for key, value in model.state_dict().items() if not key.startswith(("guard.", "estimate."))}


def learnt(model: dpl.AdaptiveModel) -> dict[str, Tensor]:
    """Return the inner state without what is known of the stream, which no freeze takes back."""
    return {key: value for key, value in inner(model).items() if not key.startswith("method.stream.")}


def frozen_model(**guard: Any) -> dpl.AdaptiveModel:
    """Batch statistics meet a stream of one class."""
    model = dpl.adapt(streams.network(), "tent", guard={"freeze_rows": 64, **guard})
    for batch, _ in streams.one_class("noise", 96):
        model(batch)
    assert model.guard.frozen
    return model


def test_the_guard_changes_nothing_on_a_harmless_stream() -> None:
    modes: list[dict[str, bool]] = [{}, {"guard": False}, {"guard": True}]
    plain, off, on = (dpl.adapt(streams.network(), "tent", **mode) for mode in modes)
    for batch, _ in streams.iid("noise", 16 * 12, size=16):
        expected = plain(batch)
        assert torch.equal(off(batch), expected)
        assert torch.equal(on(batch), expected), "the guard changed an answer on a harmless stream"
    assert off.guard is None
    assert "guard" not in off.last
    assert same(plain.state_dict(), off.state_dict())
    assert same(plain.state_dict(), inner(on))


@pytest.mark.parametrize(
    ("guard", "message"),
    [
        ({"limt": 2}, "Did you mean 'limit'"),
        ({"memory": 0}, "guard memory=0"),
        ({"allowance": 1.5}, "from 0 to 1"),
        ({"memory": 20.5}, "whole number"),
        ({"limit": True}, "expected a number"),
        ({"high": "1"}, "guard high='1'"),
        ({"low": float("nan")}, "guard low=nan"),
        ("yes", "guard='yes'"),
    ],
)
def test_wrong_settings_are_named(guard: Any, message: str) -> None:
    with pytest.raises(SettingError, match=message):
        dpl.adapt(network(), "tent", guard=guard)


def test_settings_can_be_given_as_an_object() -> None:
    assert dpl.adapt(network(), guard=GuardSettings(limit=7)).guard.settings.limit == 7


def test_invalid_images_are_excluded_and_explained() -> None:
    model, clean = dpl.adapt(network(), "tent", guard=True), dpl.adapt(network(), "tent", guard=True)
    batch = images(8)
    batch[1, 0, 0, 0], batch[6] = torch.nan, 1e20
    logits = model(batch)
    good = [0, 2, 3, 4, 5, 7]
    assert torch.equal(logits[good], clean(batch[good]))
    assert torch.equal(logits[[1, 6]], torch.zeros(2, CLASSES))
    assert list(model.last["set_aside"]) == [1, 6]
    assert "not finite" in model.last["set_aside"][1]
    assert model.last["guard"]["action"] == "set_aside"
    assert model.guard.counts["set_aside"] == 2
    assert same(inner(model), inner(clean))
    assert torch.equal(model.predict(batch)[good], clean.predict(batch[good]))


def test_a_batch_of_invalid_images_only_gets_zero_logits() -> None:
    model = dpl.adapt(network(), "tent", guard=True)
    before = inner(model)
    logits = model(torch.full((4, 3, 8, 8), torch.inf))
    assert torch.equal(logits, torch.zeros(4, CLASSES))
    assert model.last["updated"] is False
    assert "every image" in model.last["reason"]
    assert torch.equal(model.predict(torch.full((4, 3, 8, 8), torch.inf)), torch.zeros(4, CLASSES))
    assert same(before, inner(model))


@pytest.mark.parametrize("batch", [torch.zeros(0, 3, 8, 8), torch.zeros(2, 3, 8, 8).int(), torch.zeros(2, 5, 8, 8)])
def test_a_batch_of_the_wrong_kind_is_refused_and_changes_nothing(batch: Tensor) -> None:
    model = dpl.adapt(network(), "tent", guard=True)
    before = model.state_dict()
    with pytest.raises(InputError):
        model(batch)
    assert same(before, model.state_dict())


def test_a_step_that_overflows_is_undone() -> None:
    model = dpl.adapt(network(), "tent", guard=True, lr=1e39, optimizer="sgd")
    before, batch = inner(model), images(16)
    expected = model.predict(batch)
    logits = model(batch)
    assert model.guard.counts["undo"] == 1
    assert model.last["updated"] is False
    assert torch.equal(logits, expected)
    assert same(before, inner(model))


def test_a_step_to_very_large_finite_weights_is_undone() -> None:
    model = dpl.adapt(network(), "tent", guard=True, lr=1e37, optimizer="sgd")
    for i in range(3):
        assert torch.isfinite(model(images(16, seed=i))).all()
    assert model.guard.counts["undo"] == 3
    assert max(float(p.detach().abs().max()) for p in model.model.parameters()) < 100


def test_a_state_without_finite_predictions_freezes_the_model() -> None:
    model = dpl.adapt(network(), "tent", guard=True)
    model(images(16))
    with torch.no_grad():
        next(iter(model.method.trainable.values())).fill_(torch.inf)
    assert torch.isfinite(model(images(16, seed=1))).all()
    assert model.guard.frozen
    assert "finite" in model.guard.events[-1].reason


class Strict(nn.Module):
    """Refuses to predict with weights that are not finite."""

    def __init__(self) -> None:
        super().__init__()
        self.network = network()

    def forward(self, x: Tensor) -> Tensor:
        if not all(bool(parameter.isfinite().all()) for parameter in self.parameters()):
            raise ValueError("weights are not finite")
        return self.network(x)


def test_a_broken_step_is_undone_although_the_network_refuses_to_be_compared() -> None:
    model = dpl.adapt(Strict(), "tent", guard=True, lr=1e39, optimizer="sgd")
    assert torch.isfinite(model(images(16))).all()
    assert model.guard.counts["undo"] == 1


def test_a_step_that_raises_leaves_the_state_before_it() -> None:
    model = dpl.adapt(network(), "dpl", guard=True, confidence=0.0)
    model(images(8))
    before, step = inner(model), model.method.step

    def half_a_step(batch: Tensor) -> Tensor:
        step(batch)
        raise MemoryError("out of memory")

    model.method.step = half_a_step  # type: ignore[method-assign]
    with pytest.raises(MemoryError):
        model(images(8, seed=1))
    assert same(before, inner(model))


class Overflowing(nn.Module):
    """Turns ordinary bright images into infinity."""

    def __init__(self) -> None:
        super().__init__()
        self.network = network()

    def forward(self, x: Tensor) -> Tensor:
        return self.network(x * torch.where(x.amax(dim=(1, 2, 3), keepdim=True) > 1.5, torch.inf, 1.0))


def test_images_that_overflow_inside_the_network_are_excluded_too() -> None:
    model, clean = (dpl.adapt(Overflowing(), "tent", guard=True) for _ in range(2))
    batch = images(8)
    batch[3] += 1.0
    good = [0, 1, 2, 4, 5, 6, 7]
    logits = model(batch)
    assert torch.equal(logits[good], clean(batch[good]))
    assert "source model" in model.last["set_aside"][3]
    assert same(inner(model), inner(clean))
    assert torch.isfinite(model.predict(batch)).all()


def test_the_second_step_without_images_that_overflow_can_be_undone_too() -> None:
    model = dpl.adapt(Overflowing(), "tent", guard=True, lr=1e39, optimizer="sgd")
    before, batch = inner(model), images(8)
    batch[3] += 1.0
    assert torch.isfinite(model(batch)).all()
    assert model.guard.counts["undo"] == 2
    assert not model.guard.frozen
    assert same(before, inner(model))


@pytest.mark.parametrize("lr", [1e-2, 1e39], ids=["learnt", "undone"])
def test_a_callback_that_raises_after_a_second_step_leaves_no_trace(lr: float) -> None:
    def refuse(_last: Any) -> None:
        raise RuntimeError("the logger is full")

    model = dpl.adapt(Overflowing(), "tent", guard=True, lr=lr, optimizer="sgd", on_step=refuse)
    before, batch = model.state_dict(), images(8)
    batch[3] += 1.0
    with pytest.raises(RuntimeError, match="full"):
        model(batch)
    assert same(before, model.state_dict())


def test_a_harmed_model_is_frozen_and_the_source_model_predicts() -> None:
    model = frozen_model(freeze_rows=10_000)
    source, batch = streams.network(), streams.iid("noise", 32)[0][0]
    with torch.no_grad():
        expected = source(batch)
    assert torch.equal(model(batch), expected)
    assert torch.equal(model.predict(batch), expected)
    assert model.last["guard"]["answered_by"] == "source"
    assert model.last["updated"] is False
    assert model.guard.counts["freeze"] == 1
    assert [event.alarm for event in model.guard.events if event.action == "freeze"] == [True]


def test_a_frozen_model_is_reset_and_unfreezes_after_its_trial() -> None:
    model = frozen_model()
    assert same(inner(model), inner(dpl.adapt(streams.network(), "tent", guard=True)))
    for batch, _ in streams.iid("shifted", 32 * 40):
        model(batch)
    assert not model.guard.frozen
    assert model.guard.counts["unfreeze"] == 1
    assert model.last["updated"]


def test_a_sudden_change_is_compared_at_once() -> None:
    model = dpl.adapt(streams.network(), "norm", guard={"share": 0})
    for batch, _ in streams.iid("noise", 128 * 6, size=128):
        model(batch)
    assert model.last["guard"]["signals"] is None
    model(streams.one_class("noise", 128, size=128)[0][0])
    assert model.last["guard"]["signals"]["rows"] == 128


def spoilt(model: dpl.AdaptiveModel) -> dpl.AdaptiveModel:
    """Let nearly every answer be class 4, and a sure one, as a collapsed model would."""
    with torch.no_grad():
        model.model.fc.bias[4] += 8
    return model


def test_a_model_that_gained_is_put_back_to_its_last_good_state_and_returns() -> None:
    model = dpl.adapt(streams.network(), "dpl", guard={"share": 4, "limit": 4})
    batches = [images for images, _ in streams.iid("shifted", 32 * 80)]
    for batch in batches[:30]:
        model(batch)
    good = {key: value for key, value in model.guard.good.items() if not key.startswith("method.stream.")}
    assert good, "a gain this large is kept"
    spoilt(model)
    frozen = next(i for i, batch in enumerate(batches[30:]) if model(batch) is not None and model.guard.frozen)
    assert frozen <= 8
    state = inner(model)
    assert all(torch.equal(state[key], value) for key, value in good.items())
    for batch in batches[31 + frozen :]:
        model(batch)
    assert model.guard.counts["unfreeze"] >= 1


@pytest.mark.parametrize("wrong", [{"model.fc.bias": torch.zeros(3)}, {"model.no_such": torch.zeros(3)}])
def test_a_good_state_of_another_model_is_refused_before_anything_changes(wrong: dict[str, Tensor]) -> None:
    model = dpl.adapt(streams.network(), "tent", guard=True)
    model(next(images for images, _ in streams.iid("shifted", 32)))
    state = model.state_dict()
    forged = state | {f"guard.good.{name}": value for name, value in wrong.items()}
    with pytest.raises(SnapshotError):
        model.load_state_dict(forged)
    after = model.state_dict()
    assert after.keys() == state.keys()
    assert all(torch.equal(after[key], value) for key, value in state.items())


def test_a_second_freeze_returns_to_the_source_weights() -> None:
    model = dpl.adapt(streams.network(), "dpl", guard={"share": 4, "freeze_rows": 64})
    stream = [images for images, _ in streams.iid("shifted", 32 * 200)]
    for _ in range(2):
        spoilt(model)
        while not model.guard.frozen:
            model(stream.pop())
        first = learnt(model)
        while model.guard.frozen:
            model(stream.pop())
    assert same(first, learnt(dpl.adapt(streams.network(), "dpl", guard=True)))
    assert model.guard.evidence.freezes == 2


def test_events_are_passed_on_counted_and_bounded() -> None:
    heard: list[GuardEvent] = []
    model = dpl.adapt(network(), "tent", guard={"log": 3})
    model.guard.call_on_event(heard.append)
    for _ in range(5):
        batch = images(12)
        batch[0] = torch.nan
        model(batch)
    assert len(model.guard.events) == 3
    assert [event.batch for event in heard] == [1, 2, 3, 4, 5]
    assert model.guard.counts["set_aside"] == 5


def test_comparisons_report_their_signals() -> None:
    model = dpl.adapt(network(), "tent", guard=True)
    model(images(16))
    signals = model.last["guard"]["signals"]
    assert signals["rows"] == 16
    assert 0 <= signals["disagreement"] <= 1
    assert signals["drift"] > 0
    assert signals["selected"] is None, "TENT adapts to all images"
    choosy = dpl.adapt(network(), "dpl", guard=True, confidence=0.0)
    choosy(images(16))
    assert choosy.last["guard"]["signals"]["selected"] == 1.0


def test_comparisons_take_a_set_share_of_the_time() -> None:
    model, seen = dpl.adapt(streams.network(), "tent", guard={"share": 0.2}), []
    for batch, _ in streams.iid("easy", 64 * 32, size=64):
        model(batch)
        seen.append(model.last["guard"]["signals"] is not None)
    assert all(seen[:4]), "a new stream is compared closely"
    assert sum(seen[4:]) <= 0.2 * 28 * 3 / 4 + 4, "a step costs three passes, a comparison four; some were called for"


@pytest.mark.parametrize("make", [frozen_model, lambda: dpl.adapt(streams.network(), "tent", guard=True)])
def test_a_restored_guarded_model_continues_exactly(make: Any) -> None:
    model = make()
    batches = [images for images, _ in streams.iid("shifted", 60 * 8, 8)]
    for batch in batches[:10]:
        model(batch)
    twin = dpl.adapt(streams.network(), "tent", guard=model.guard.settings)
    twin.load_state_dict(model.state_dict())
    for batch in batches[10:]:
        assert torch.equal(model(batch), twin(batch))
    assert same(model.state_dict(), twin.state_dict())


def test_reset_also_resets_the_guard() -> None:
    model = frozen_model()
    model.reset()
    assert same(model.state_dict(), dpl.adapt(streams.network(), "tent", guard=model.guard.settings).state_dict())


def test_states_with_and_without_a_guard_do_not_fit_each_other() -> None:
    plain, guarded = dpl.adapt(network(), "tent"), dpl.adapt(network(), "tent", guard=True)
    with pytest.raises(SnapshotError):
        guarded.load_state_dict(plain.state_dict())
    with pytest.raises(SnapshotError):
        plain.load_state_dict(guarded.state_dict())


def test_a_copy_is_independent() -> None:
    model = dpl.adapt(network(), "tent", guard=True)
    model(images(8))
    twin = copy.deepcopy(model)
    before = model.state_dict()
    twin(images(8, seed=1))
    assert same(before, model.state_dict())
    assert twin.guard.batches == model.guard.batches + 1


def test_the_guard_moves_with_the_model() -> None:
    model = dpl.adapt(network(), "tent", guard=True)
    for i in range(40):
        model(images(16, seed=i))
    model.double()
    logits = model(images(16, seed=99).double())
    assert logits.dtype == torch.float64
    assert model.watch.source(images(4).double()).dtype == torch.float64
    model.reset()
    assert torch.isfinite(model(images(16).double())).all()


def test_the_callers_network_is_untouched() -> None:
    source = network()
    before = copy.deepcopy(source.state_dict())
    flags = [p.requires_grad for p in source.parameters()]
    model = dpl.adapt(source, "tent", guard=True)
    for i in range(5):
        model(images(8, seed=i))
    assert same(before, source.state_dict())
    assert flags == [p.requires_grad for p in source.parameters()]
