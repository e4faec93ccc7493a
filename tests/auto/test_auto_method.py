"""The automatic choice: its phases, its exactness in each of them, and what it recommends."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

import dpl
from abuse import streams
from dpl.auto import Auto
from dpl.runs.recommend import recommend
from dpl.testing import Subject, copies_are_independent, reset_is_exact, resumes_exactly, rolls_back
from nets import images, network

QUICK = {"trial": 2, "check": 2, "patience": 4}
BATCHES = [images(32, seed=i) for i in range(6)]


def through_all_phases(**settings: int) -> tuple[dpl.AdaptiveModel, list[str]]:
    model = dpl.adapt(network(), **(QUICK | settings))
    phases = []
    for i in range(12):
        model(BATCHES[i % 6])
        phases.append(model.last["phase"])
    return model, phases


def test_auto_is_the_method_if_none_is_named() -> None:
    assert isinstance(dpl.adapt(network()).method, Auto)
    assert "auto" in dpl.list_methods()


def test_a_stream_with_low_confidence_is_watched_and_candidates_are_tried() -> None:
    _, phases = through_all_phases()
    assert phases[0] == "watch"
    assert "trial" in phases
    assert phases[-1] in ("learn", "hold")
    assert phases.index("trial") < len(phases) - phases[::-1].index("trial")


@pytest.mark.parametrize("cut", [2, 5, 8])
@pytest.mark.parametrize("kind", ["batch", "tokens", "none"])
def test_it_resumes_exactly_in_every_phase(kind: str, cut: int) -> None:
    resumes_exactly(Subject("auto", network(kind), BATCHES, QUICK), cut=cut, more=6)


@pytest.mark.parametrize("check", [reset_is_exact, rolls_back, copies_are_independent], ids=lambda c: c.__name__)
def test_state_is_exact_with_batches_that_are_adapted_to(check: object) -> None:
    check(Subject("auto", network(), BATCHES, QUICK))  # type: ignore[operator]


def test_the_source_weights_predict_during_the_trial() -> None:
    model, source = dpl.adapt(network(), layout="as_is", norm="running", **(QUICK | {"trial": 50})), network()
    for i in range(10):
        logits = model(BATCHES[i % 6])
    assert model.last["phase"] == "trial"
    assert torch.equal(logits, source(BATCHES[9 % 6]).detach())
    own = dict(model.model.named_parameters())
    assert all(torch.equal(own[name], p) for name, p in source.named_parameters())


def test_learning_that_loses_predictions_ends() -> None:
    model, batches = dpl.adapt(streams.network(), **QUICK), [x for x, _ in streams.iid("shifted", 32 * 14)]
    for batch in batches[:8]:
        model(batch)
    assert model.last["phase"] == "learn"
    with torch.no_grad():
        for parameter in model.model.fc.parameters():
            parameter.copy_(-parameter)  # every prediction is now wrong
    logits = [model(batch) for batch in batches[8:]]
    assert model.last["phase"] != "learn"
    source = dict(streams.network().named_parameters())
    assert all(torch.equal(source[name], p) for name, p in model.model.named_parameters())
    assert torch.isfinite(torch.cat(logits)).all()


def test_calibration_measures_the_confidence_on_source_domain_data() -> None:
    source = [(BATCHES[0], torch.zeros(32, dtype=torch.long))]
    model = dpl.adapt(network(), calibrate=source)
    expected = float(network()(BATCHES[0]).detach().softmax(dim=1).amax(dim=1).mean())
    assert model.method.source_confidence == pytest.approx(expected, abs=1 / 64)
    for i in range(6):
        model(BATCHES[i])
    assert model.last["phase"] == "hold"  # as confident as there
    with pytest.raises(dpl.SettingError, match="calibrate= works only with method 'auto'"):
        dpl.adapt(network(), "tent", calibrate=source)


def test_a_snapshot_keeps_the_calibration(tmp_path: Path) -> None:
    model = dpl.adapt(network(), calibrate=[(BATCHES[0], torch.zeros(32, dtype=torch.long))])
    model(BATCHES[1])
    model.save(tmp_path / "snapshot")
    again = dpl.load(tmp_path / "snapshot", network())
    assert torch.equal(model(BATCHES[2]), again(BATCHES[2]))
    again.reset()
    assert again.method.source_confidence == model.method.source_confidence > 0


def test_a_recommendation_can_be_followed_by_hand() -> None:
    chosen = recommend(network(), BATCHES * 3)
    by_hand = dpl.adapt(network(), chosen.method, **chosen.settings)
    assert by_hand.method.info.name == chosen.method
    assert chosen.why
    assert chosen.call.startswith("dpl.adapt(model, ")


def test_a_recommendation_needs_images() -> None:
    with pytest.raises(dpl.DataError, match="no image to choose by"):
        recommend(network(), iter(list[Tensor]()))
