"""`model.estimate()` on real digits: near the truth, exact in snapshots, no change of the answers."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import dpl
from abuse import streams
from abuse.subjects import adapted as adapted_model
from abuse.subjects import methods
from dpl.core.errors import SettingError
from dpl.estimate.signals import Accuracies, Home, Window, accuracies
from parity.tiny import source_images


def labelled(count: int = 500) -> tuple[Tensor, Tensor]:
    images, labels = source_images(torch.float32)
    return images[:count], labels[:count]


def watched(method: str = "tent", **kwargs: Any) -> dpl.AdaptiveModel:
    return dpl.adapt(streams.network(), method, calibrate=labelled(), layout="as_is", **kwargs)


def play(model: dpl.AdaptiveModel, batches: list[streams.Batch]) -> float:
    """Feed a stream; return the accuracy of the last 512 images in percent."""
    right = torch.cat([model(images).argmax(dim=1) == labels for images, labels in batches])
    return 100 * float(right[-512:].double().mean())


@pytest.mark.parametrize("shift", ["noise", "shifted", "easy"])
def test_the_estimate_is_near_the_truth(shift: str) -> None:
    model = watched(estimate={"share": 2.0})
    batches = streams.iid(shift, 64 * 12, size=64)
    truth, found = play(model, batches), model.estimate()
    with torch.no_grad():
        of_source = torch.cat([streams.network()(images).argmax(dim=1) == labels for images, labels in batches])
    assert truth - 10 <= found.accuracy <= truth + 8  # a crowded batch costs TENT some firm predictions
    assert found.source == pytest.approx(100 * float(of_source[-512:].double().mean()), abs=12)
    assert found.low <= found.accuracy <= found.high
    assert found.rows >= 256


@pytest.mark.parametrize("accuracy", [0.0, 0.0005, 0.5, 0.9995, 1.0])
def test_the_interval_holds_the_estimate(accuracy: float) -> None:
    low, high = watched().watch.home.interval(accuracy, 200)
    assert 0 <= low <= accuracy <= high <= 1


def test_the_worse_model_is_bounded_by_agreement() -> None:
    assert Accuracies(adapted=0.7, source=0.5, agreement=0.4).shown == (0.7, 0.4)
    right = Accuracies(adapted=0.7, source=1.0, agreement=0.4).shown  # where they differ, it can only be wrong
    assert right == (0.4, 1.0)
    both_poor, source = Accuracies(adapted=0.25, source=0.3, agreement=0.1).shown
    assert 0.1 < both_poor < 0.25
    assert source == 0.3


def test_a_broken_model_is_shown_far_below_the_source_model() -> None:
    model = watched()
    truth = play(model, streams.correlated("noise", 32 * 30))
    found = model.estimate()
    assert truth < 30
    assert found.accuracy < found.source - 10
    assert found.verdict != "better"


def test_a_broken_model_is_called_worse_without_labelled_data() -> None:
    model = dpl.adapt(streams.network(), "tent", estimate=True)
    play(model, streams.correlated("noise", 32 * 30))
    found = model.estimate()
    assert (found.verdict, found.accuracy) == ("worse", None)
    assert "calibrate=" in found.reason


def test_a_gain_is_called_better_without_labelled_data() -> None:
    model = dpl.adapt(streams.network(), "tent", estimate=True)
    play(model, streams.iid("shifted", 64 * 12, size=64))
    assert model.estimate().verdict == "better"
    assert model.last["estimate"] == model.estimate().as_dict()


def test_without_watching_or_images_it_is_unsure_and_says_why() -> None:
    plain = dpl.adapt(streams.network(), "tent")
    assert plain.estimate().verdict == "unsure"
    assert "estimate=True" in plain.estimate().reason
    assert "estimate" not in plain.last
    fresh = watched().estimate()
    assert (fresh.verdict, fresh.accuracy, fresh.rows) == ("unsure", None, 0)
    assert "0 images" in fresh.reason


@pytest.mark.parametrize("name", methods())
def test_it_works_for_every_method_and_changes_no_answer(name: str) -> None:
    plain, model = (adapted_model(name, guard=False, estimate=on) for on in (False, True))
    for images, _ in streams.iid("noise", 32 * 5):
        assert torch.equal(plain(images), model(images))
    assert model.estimate().verdict in ("better", "worse", "unsure")
    assert model.estimate().rows >= 100


def test_looks_cost_a_set_share(monkeypatch: pytest.MonkeyPatch) -> None:
    model = watched("tent", estimate={"share": 0.25})
    seen: list[int] = []
    predict, source = model.method.predict, model.watch.source
    monkeypatch.setattr(model.method, "predict", lambda images: seen.append(len(images)) or predict(images))
    monkeypatch.setattr(model.watch, "source", lambda images: seen.append(len(images)) or source(images))
    play(model, streams.iid("noise", 32 * 60))
    fresh = 5 * 256 + 2 * 200
    assert sum(seen) <= 0.25 * 3 * 32 * 60 + 5 * 32 + fresh, "a step costs three passes; one look may be ahead"


def test_a_snapshot_continues_the_estimate_exactly(tmp_path: Path) -> None:
    model, batches = watched(), streams.iid("noise", 32 * 16)
    play(model, batches[:10])
    model.save(tmp_path / "snapshot")
    twin = dpl.load(tmp_path / "snapshot", streams.network(), calibrate=labelled())
    assert twin.estimate() == model.estimate()
    for each in (model, twin):
        play(each, batches[10:])
    assert twin.estimate() == model.estimate()
    assert dpl.load(tmp_path / "snapshot", streams.network()).estimate().accuracy is not None


def test_reset_forgets_the_stream_and_keeps_what_labelled_data_showed() -> None:
    model, fresh = watched(), watched()
    play(model, streams.iid("noise", 32 * 6))
    model.reset()
    assert model.estimate() == fresh.estimate()
    assert model.watch.home.accuracy == fresh.watch.home.accuracy > 0.9
    state, expected = model.state_dict(), fresh.state_dict()
    assert state.keys() == expected.keys()
    assert all(torch.equal(state[key], expected[key]) for key in state)


def test_the_estimate_moves_with_the_model() -> None:
    model = watched()
    play(model, streams.iid("noise", 32 * 6))
    model.double()
    for images, _ in streams.iid("noise", 32 * 8):
        model(images.double())
    assert model.estimate().rows > 100


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"calibrate": labelled(20)}, "20 labelled images"),
        ({"calibrate": (labelled()[0], labelled()[1] + 5)}, "expected one label from 0 to 9"),
        ({"estimate": "yes"}, "estimate='yes'"),
        ({"estimate": {"shar": 1}}, "Did you mean 'share'"),
        ({"estimate": {"window": 2}}, "estimate window=2"),
    ],
)
def test_wrong_arguments_are_named(kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingError, match=message):
        dpl.adapt(streams.network(), "tent", **kwargs)


def test_the_scale_of_the_adapted_logits_does_not_matter() -> None:
    generator = torch.Generator().manual_seed(0)
    source = 4 * torch.randn(300, 10, generator=generator)
    adapted = source + torch.randn(300, 10, generator=generator)
    firm = torch.rand(300, generator=generator) < 0.9
    home = Home()
    home.rows, home.accuracy, home.firmness = 100, 0.8, 0.77
    home.temperature, home.balance = 1.5, torch.full((10,), 0.1)
    alike = torch.zeros(300), torch.zeros(300)
    found = [accuracies(Window(source, scale * adapted, firm, firm, *alike), home) for scale in (1.0, 0.01, 50.0)]
    assert found[1].adapted == pytest.approx(found[2].adapted, abs=1e-4)
    assert found[1].adapted == pytest.approx(found[0].adapted, abs=0.02)
