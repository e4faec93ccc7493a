"""The automatic choice: its phases, its exactness in each of them, and what it recommends."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

import dpl
from dpl.auto import Auto
from dpl.runs.recommend import draw, recommend
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


def test_it_is_what_an_unnamed_method_means() -> None:
    assert isinstance(dpl.adapt(network()).method, Auto)
    assert "auto" in dpl.list_methods()


def test_an_unsure_source_is_watched_tried_and_taught() -> None:
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
def test_promises_with_batches_that_are_learnt_from(check: object) -> None:
    check(Subject("auto", network(), BATCHES, QUICK))  # type: ignore[operator]


def test_while_it_tries_the_source_answers() -> None:
    model, source = dpl.adapt(network(), layout="as_is", **(QUICK | {"trial": 50})), network()
    for i in range(10):
        logits = model(BATCHES[i % 6])
    assert model.last["phase"] == "trial"
    if model.last["norm"] == 0:
        assert torch.equal(logits, source(BATCHES[9 % 6]).detach())
    own = dict(model.model.named_parameters())
    assert all(torch.equal(own[name], p) for name, p in source.named_parameters())


def test_learning_that_loses_answers_ends() -> None:
    model, _ = through_all_phases()
    method = model.method
    if method.phase != 2:
        pytest.skip("nothing was learnt on this machine's arithmetic")
    with torch.no_grad():
        for name, parameter in model.model.named_parameters():
            if name.startswith("fc"):
                parameter.copy_(-parameter)  # a collapse
    answers = [model(BATCHES[i % 6]) for i in range(6)]
    assert model.last["phase"] != "learn"
    home = dict(network().named_parameters())
    assert all(torch.equal(home[name], p) for name, p in model.model.named_parameters())
    assert torch.isfinite(torch.stack(answers)).all()


def test_calibration_tells_how_sure_the_source_is_at_home() -> None:
    source = [(BATCHES[0], torch.zeros(32, dtype=torch.long))]
    model = dpl.adapt(network(), calibrate=source)
    expected = float(network()(BATCHES[0]).detach().softmax(dim=1).amax(dim=1).mean())
    assert model.method.home_sure == pytest.approx(expected, abs=1 / 64)
    for i in range(6):
        model(BATCHES[i])
    assert model.last["phase"] == "hold"  # as sure as at home
    with pytest.raises(dpl.SettingError, match="calibrate= is for the automatic choice"):
        dpl.adapt(network(), "tent", calibrate=source)


def test_a_calibrated_snapshot_comes_back(tmp_path: Path) -> None:
    model = dpl.adapt(network(), calibrate=[(BATCHES[0], torch.zeros(32, dtype=torch.long))])
    model(BATCHES[1])
    model.save(tmp_path / "snapshot")
    again = dpl.load(tmp_path / "snapshot", network())
    assert torch.equal(model(BATCHES[2]), again(BATCHES[2]))
    again.reset()
    assert again.method.home_sure == model.method.home_sure > 0


def test_a_recommendation_can_be_followed_by_hand(tmp_path: Path) -> None:
    chosen = recommend(network(), BATCHES * 3)
    by_hand = dpl.adapt(network(), chosen.method, **chosen.settings)
    assert by_hand.method.info.name == chosen.method
    assert chosen.why
    assert chosen.call.startswith("dpl.adapt(model, ")
    picture = draw(chosen, tmp_path / "why.png")
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_recommendation_needs_images() -> None:
    with pytest.raises(dpl.DataError, match="no image to choose by"):
        recommend(network(), iter(list[Tensor]()))
