"""Where the latest images are of one class, a member of the DPL family learns nothing, and forgets what it learnt."""

import pytest
import torch
from torch import Tensor

import dpl
from abuse import streams
from dpl.demo.digits import load_source_network, uci_digits
from dpl.testing import Subject, copies_are_independent, predict_changes_nothing, reset_is_exact, resumes_exactly
from nets import network

Batch = tuple[Tensor, Tensor]
MEMBERS = ["dpl_o", "dpl_star", "dpl", "dpl_dagger"]
SCOPES = ["affine", "classifier", "features", "all"]


def digits(size: int, *, in_order: bool, count: int = 600) -> list[Batch]:
    pixels, labels = uci_digits()
    rows = torch.randperm(len(labels), generator=torch.Generator().manual_seed(1))[:count]
    rows = rows[labels[rows].argsort(stable=True)] if in_order else rows
    return [(pixels[part], labels[part]) for part in rows.split(size)]


def right(model: dpl.AdaptiveModel, batches: list[Batch]) -> int:
    return sum(int((model(pixels).argmax(dim=1) == labels).sum()) for pixels, labels in batches)


def family(name: str = "dpl", **settings: object) -> dpl.AdaptiveModel:
    return dpl.adapt(load_source_network()[0], name, **settings)


@pytest.mark.parametrize("size", [2, 4, 8, 32])
@pytest.mark.parametrize("scope", SCOPES)
def test_digits_in_class_order_are_predicted_as_the_source_model_does(scope: str, size: int) -> None:
    batches = digits(size, in_order=True)
    source = right(family("source"), batches)
    rate = 5e-5 if scope in ("all", "features") else 1e-3
    assert right(family(scope=scope, lr=rate), batches) >= source - 3  # of 600


def test_without_the_rule_they_are_not() -> None:
    batches = digits(8, in_order=True)
    found = {only: right(family(scope="classifier", lr=1e-3, mixed_only=only), batches) for only in (True, False)}
    assert found[False] < found[True] - 12


@pytest.mark.parametrize("method", MEMBERS)
def test_a_mixed_stream_is_learnt_from_as_without_the_rule(method: str) -> None:
    batches = digits(8, in_order=False, count=320)
    models = [family(method, mixed_only=only) for only in (True, False)]
    assert all(torch.equal(models[0](pixels), models[1](pixels)) for pixels, _ in batches)
    assert models[0].last.updated is True


def one_class_in_noise(size: int) -> list[Tensor]:
    return [pixels for pixels, _ in streams.one_class("noise", 32 * size, size=size)]


@pytest.mark.parametrize("size", [8, 32, 100])
def test_what_was_learnt_before_goes_and_the_reason_is_told(size: int) -> None:
    model = dpl.adapt(streams.network(), "dpl", lr=1e-2, confidence=0.0, layout="as_is")
    for pixels, _ in streams.iid("noise", 2 * size, size=size):
        model(pixels)
    assert any(not torch.equal(a, b) for a, b in model.method.stream.model.trained())
    for pixels in one_class_in_noise(size):
        model(pixels)
    assert model.method.stream.doubts == 2
    assert model.last.updated is False
    assert model.last.reason == "the latest images look like one class, or few"
    assert all(torch.equal(a, b) for a, b in model.method.stream.model.trained())


def test_it_learns_again_once_images_are_mixed() -> None:
    model = dpl.adapt(streams.network(), "dpl", confidence=0.0, layout="as_is")
    for pixels in one_class_in_noise(32):
        model(pixels)
    updates = []
    for pixels, _ in streams.iid("noise", 32 * 8):
        model(pixels)
        updates.append(model.last.updated)
    assert updates[-1] is True


def test_looks_become_rare_while_images_are_mixed(monkeypatch: pytest.MonkeyPatch) -> None:
    model, seen = dpl.adapt(streams.network(), "dpl", layout="as_is"), []
    looked = model.method.stream._look
    monkeypatch.setattr(model.method.stream, "_look", lambda x: (seen.append(len(x)), looked(x)))
    where = []
    for pixels, _ in streams.iid("noise", 1800, size=8):
        before = len(seen)
        model(pixels)
        where += [model.method.stream.seen] * (len(seen) - before)
    assert where == [64, 128, 256, 512, 1024, 1536]
    assert set(seen) == {64}


@pytest.mark.parametrize("size", [8, 40, 200])
def test_no_image_is_kept_that_the_next_look_does_not_need(size: int) -> None:
    model = dpl.adapt(streams.network(), "dpl", layout="as_is")
    for pixels, _ in streams.iid("noise", 2000, size=size):
        model(pixels)
        stream = model.method.stream
        kept = 0 if stream.recent is None else len(stream.recent)
        assert kept <= (64 if stream.seen > stream.due - 64 else 0)


@pytest.mark.parametrize("check", [reset_is_exact, resumes_exactly, copies_are_independent, predict_changes_nothing])
@pytest.mark.parametrize("method", ["dpl", "dpl_dagger"])
def test_it_is_part_of_the_state(method: str, check: object) -> None:
    check(Subject(method, streams.network(), one_class_in_noise(16)[:14], {}))  # type: ignore[operator]


def test_a_failed_call_takes_back_the_return_to_the_source(monkeypatch: pytest.MonkeyPatch) -> None:
    model = dpl.adapt(streams.network(), "dpl", lr=1e-2, confidence=0.0, layout="as_is")
    for pixels, _ in streams.iid("noise", 32, size=16):
        model(pixels)
    one_class = one_class_in_noise(64)[0]
    before = model.state_dict()

    def fail(_images: Tensor) -> Tensor:
        raise RuntimeError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr(model.method, "predict", fail)
        with pytest.raises(RuntimeError, match="no memory"):
            model(one_class)
    after = model.state_dict()
    assert all(torch.equal(before[key], after[key]) for key in before)
    model(one_class)
    assert model.method.stream.doubts == 2


def test_norm_auto_and_networks_without_batch_norm_go_without() -> None:
    assert dpl.adapt(network(), "dpl", norm="auto").method.stream is None
    assert dpl.adapt(network("group"), "dpl").method.stream is None
    assert dpl.adapt(network(), "dpl", mixed_only=False).method.stream is None


def test_an_added_loss_has_no_such_setting() -> None:
    with pytest.raises(dpl.SettingError, match="dpl_mixed_only"):
        dpl.adapt(network(), "tent+dpl", dpl_mixed_only=False)
