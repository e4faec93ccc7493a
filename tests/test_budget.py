"""What fits a budget is chosen by measured cost, kept in the settings, and leaves the source behind."""

import pytest
import torch
from torch import nn

import dpl
from dpl.budget import Choice, fit, later_stages
from nets import Wrapped, images, network

COSTS = {None: 3.0, "a": 2.5, "b": 2.0, "c": 1.6, "d": 1.1}


def choose(budget: float) -> tuple[Choice, list[str | None]]:
    asked: list[str | None] = []

    def cost(start: str | None) -> float:
        asked.append(start)
        return COSTS[start]

    return fit(budget, ["a", "b", "c", "d"], cost), asked


@pytest.mark.parametrize(
    ("budget", "start", "interval"),
    [(5, None, 1), (3, None, 1), (2.6, "a", 1), (2, "b", 1), (1.6, "c", 1), (1.2, "d", 1)],
)
def test_the_earliest_start_that_fits_is_taken(budget: float, start: str | None, interval: int) -> None:
    choice, asked = choose(budget)
    assert (choice.start, choice.interval) == (start, interval)
    assert choice.cost == COSTS[start] <= budget
    assert len(asked) == len(set(asked)) <= 4, "bisection"


def test_where_no_start_fits_some_batches_are_only_predicted() -> None:
    choice, _ = choose(1.03)
    assert (choice.start, choice.interval) == ("d", 4)
    assert choice.cost == pytest.approx(1.025)


def test_stages_are_found_inside_wrappers() -> None:
    assert later_stages(network()) == ["layer2", "fc"]
    assert later_stages(Wrapped(network())) == ["network.layer2", "network.fc"]
    assert later_stages(network(), "layer2") == ["fc"]
    blocks = nn.ModuleDict(
        {"stem": nn.Conv2d(3, 4, 3), "blocks": nn.Sequential(*(nn.Sequential(nn.Linear(2, 2)) for _ in range(3)))}
    )
    assert later_stages(blocks) == ["blocks.0", "blocks.1", "blocks.2"]


def clock(monkeypatch: pytest.MonkeyPatch, inference: float, step: dict[int, float]) -> None:
    """Let inference and steps take given times, steps by the number of parameters that train."""

    def taken(run, _device, runs: int = 3) -> float:
        model = current[0]
        run()
        return inference if runs == 3 else step[len(model.trainable)]

    monkeypatch.setattr("dpl.adapter.best_seconds", taken)


current: list[dpl.AdaptiveModel] = []


def budgeted(monkeypatch: pytest.MonkeyPatch, budget: float, **settings) -> dpl.AdaptiveModel:
    clock(monkeypatch, 1.0, {10: 3.0, 6: 1.8, 2: 1.2})
    model = dpl.adapt(network(), "dpl", budget=budget, confidence=0.0, **settings)
    current[:] = [model]
    model(images())
    return model


@pytest.mark.parametrize(
    ("budget", "start", "interval", "cost"), [(4, None, 1, 3.0), (2, "layer2", 1, 1.8), (1.05, "fc", 4, 1.05)]
)
def test_the_first_batch_decides(monkeypatch, budget: float, start: str | None, interval: int, cost: float) -> None:
    model = budgeted(monkeypatch, budget)
    assert (model.settings.start, model.settings.interval) == (start, interval)
    assert model.budgeted.cost == pytest.approx(cost)


def test_measuring_leaves_the_source_behind(monkeypatch) -> None:
    plain = dpl.adapt(network(), "dpl", start="layer2", confidence=0.0)
    plain(images())
    model = budgeted(monkeypatch, 2)
    assert all(torch.equal(a, b) for a, b in zip(plain.model.parameters(), model.model.parameters(), strict=True))
    model.reset()
    assert torch.equal(model.predict(images()), network()(images()))


def test_a_snapshot_keeps_the_choice(monkeypatch, tmp_path) -> None:
    model = budgeted(monkeypatch, 2)
    again = dpl.load(model.save(tmp_path / "kept"), network())
    assert again.settings == model.settings
    assert torch.equal(again(images(seed=1)), model(images(seed=1)))


def test_a_real_clock_gives_a_choice_within_the_budget() -> None:
    model = dpl.adapt(network(), "tent", budget=1e6)
    model(images())
    assert model.settings.start is None
    assert model.budgeted.cost > 0


@pytest.mark.parametrize("budget", [1, 0.5, -1, "much", float("nan")])
def test_a_budget_that_is_none_is_refused(budget: object) -> None:
    with pytest.raises(dpl.SettingError, match="budget="):
        dpl.adapt(network(), "dpl", budget=budget)


def test_methods_without_steps_have_nothing_to_save() -> None:
    with pytest.raises(dpl.SettingError, match="takes no gradient steps of its own"):
        dpl.adapt(network(), "t3a", budget=1.5)
