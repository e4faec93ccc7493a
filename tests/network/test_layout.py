"""The memory layout: measured for large networks, left alone for small ones, never a change of values."""

import pytest
import torch
from torch import nn

import dpl
from dpl.network import layout
from nets import images, network


def wide(channels: int = 64) -> nn.Sequential:
    torch.manual_seed(0)
    block = [nn.Conv2d(channels, channels, 3, padding=1), nn.BatchNorm2d(channels), nn.ReLU()]
    return nn.Sequential(
        nn.Conv2d(3, channels, 3), *block, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 5)
    )


BATCH = torch.rand(8, 3, 32, 32, generator=torch.Generator().manual_seed(0))


def is_channels_last(model: dpl.AdaptiveModel) -> bool:
    return model.model[1].weight.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize(("as_is", "other", "expected"), [(2.0, 1.0, "channels_last"), (1.0, 2.0, "as_is")])
def test_the_faster_layout_is_taken(monkeypatch, as_is: float, other: float, expected: str) -> None:
    clock = iter([other, as_is] * 3)  # in turns
    monkeypatch.setattr(layout, "best_seconds", lambda _run, _device, runs: next(clock))
    monkeypatch.setattr(layout, "_known", {})
    monkeypatch.setattr(layout, "_SMALL", 1e8)
    model = dpl.adapt(wide(), "tent")
    assert model.layout == "auto"
    model(BATCH)
    assert model.layout == expected
    assert is_channels_last(model) is (expected == "channels_last")
    dpl.adapt(wide(), "tent")(BATCH)  # the same answer without another look at the clock


def test_each_kind_of_normalisation_and_of_training_is_measured_by_itself(monkeypatch) -> None:
    monkeypatch.setattr(layout, "_known", {})
    monkeypatch.setattr(layout, "_SMALL", 1e8)
    for method in ("tent", "norm", "dpl", "source", "pl"):
        dpl.adapt(wide(), method)(BATCH)
    assert len(layout._known) == 4  # pl trains what dpl trains


def test_it_is_really_measured(monkeypatch) -> None:
    monkeypatch.setattr(layout, "_known", {})
    monkeypatch.setattr(layout, "_SMALL", 1e8)
    model = dpl.adapt(wide(), "tent")
    model(BATCH)
    assert model.layout in ("as_is", "channels_last")


@pytest.mark.parametrize("method", ["tent", "dpl", "dpl_dagger", "cotta", "rotta", "sar", "t3a"])
def test_values_change_by_rounding_only(method: str) -> None:
    plain, fast = (dpl.adapt(wide(), method, layout=kind) for kind in ("as_is", "channels_last"))
    for seed in range(3):
        batch = torch.rand(8, 3, 16, 16, generator=torch.Generator().manual_seed(seed))
        assert torch.allclose(plain(batch), fast(batch), atol=1e-5)
    assert is_channels_last(fast)
    assert not is_channels_last(plain)


def test_small_networks_and_networks_without_convolutions_stay_as_they_are() -> None:
    small = dpl.adapt(network(), "tent")
    small(images())
    flat = dpl.adapt(nn.Sequential(nn.Flatten(), nn.Linear(12, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)), "tent")
    flat(torch.rand(4, 12))
    assert small.layout == flat.layout == "as_is"


def test_a_choice_made_by_the_owner_stands(monkeypatch) -> None:
    monkeypatch.setattr(layout, "best_seconds", lambda *_: pytest.fail("measured"))
    model = dpl.adapt(wide().to(memory_format=torch.channels_last), "tent")
    model(BATCH)
    assert model.layout == "as_is"
    assert is_channels_last(model)


def test_a_snapshot_remembers_the_choice(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(layout, "best_seconds", lambda *_: pytest.fail("measured"))
    model = dpl.adapt(wide(), "dpl", layout="channels_last", confidence=0.0)
    model(BATCH)
    again = dpl.load(model.save(tmp_path / "kept"), wide())
    assert again.layout == "channels_last"
    assert is_channels_last(again)
    assert torch.equal(model(BATCH), again(BATCH))
    model.reset()
    assert torch.equal(model.predict(BATCH), dpl.adapt(wide(), "dpl", layout="channels_last").predict(BATCH))


def test_an_unknown_layout_is_refused() -> None:
    with pytest.raises(dpl.SettingError, match="layout='nhwc': expected one of 'auto'"):
        dpl.adapt(network(), "dpl", layout="nhwc")
