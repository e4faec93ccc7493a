"""The memory layout: a fixed rule or a measurement, never a change of values."""

import time

import pytest
import torch
from torch import nn

import dpl
from nets import images, network


def wide(channels: int = 64, kernel: int = 3) -> nn.Sequential:
    torch.manual_seed(0)
    block = [nn.Conv2d(channels, channels, kernel, padding=kernel // 2), nn.BatchNorm2d(channels), nn.ReLU()]
    return nn.Sequential(
        nn.Conv2d(3, channels, kernel), *block, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 5)
    )


BATCH = torch.rand(8, 3, 32, 32, generator=torch.Generator().manual_seed(0))
LARGE = torch.rand(2, 3, 64, 64, generator=torch.Generator().manual_seed(1))


def is_channels_last(model: dpl.AdaptiveModel) -> bool:
    return model.model[1].weight.is_contiguous(memory_format=torch.channels_last)


def test_large_images_and_spatial_convolutions_run_in_channels_last() -> None:
    model = dpl.adapt(wide(), "tent")
    assert model.layout == "auto"
    model(LARGE)
    assert model.layout == "channels_last"
    assert is_channels_last(model)


def test_small_images_and_pointwise_networks_stay_as_they_are() -> None:
    small, pointwise = dpl.adapt(wide(), "tent"), dpl.adapt(wide(kernel=1), "tent")
    small(BATCH)
    pointwise(LARGE)
    assert small.layout == pointwise.layout == "as_is"


@pytest.mark.parametrize("slow", ["as_is", "channels_last"])
def test_timed_measures_both_layouts_and_takes_the_faster(slow: str) -> None:
    runs = []

    def wait_in_the_slow_layout(layer: nn.Module, _inputs: tuple[torch.Tensor]) -> None:
        runs.append("as_is" if layer.weight.is_contiguous() else "channels_last")
        time.sleep(0.2 if runs[-1] == slow else 0)

    network = wide()
    network[1].register_forward_pre_hook(wait_in_the_slow_layout)
    model = dpl.adapt(network, "tent", layout="timed")
    model(BATCH)
    assert set(runs) == {"as_is", "channels_last"}
    assert model.layout == ({"as_is", "channels_last"} - {slow}).pop()
    assert is_channels_last(model) == (model.layout == "channels_last")


def test_timed_runs_the_network_and_keeps_its_values() -> None:
    model, plain = dpl.adapt(wide(), "tent", layout="timed"), dpl.adapt(wide(), "tent", layout="as_is")
    assert torch.allclose(model(BATCH), plain(BATCH), atol=1e-5)
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


def test_a_network_in_channels_last_is_left_as_it_is() -> None:
    model = dpl.adapt(wide().to(memory_format=torch.channels_last), "tent")
    model(LARGE)
    assert model.layout == "as_is"
    assert is_channels_last(model)


def test_a_snapshot_keeps_the_layout(tmp_path) -> None:
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
