"""NOTE's own logic: the layer as its authors write it, the reservoir, when it learns."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dpl
from dpl.core.errors import SettingError
from dpl.methods.note import InstanceAware
from dpl.network import Network
from parity.tiny import stream, tiny_network

IMAGES = torch.cat(stream(torch.float32))


def note(**settings: Any) -> dpl.AdaptiveModel:
    return dpl.adapt(tiny_network(torch.float32), "note", **settings)


class LiteralLayer(nn.Module):
    """The layer written out instance by instance and channel by channel."""

    def __init__(self, layer: nn.BatchNorm2d, k: float) -> None:
        super().__init__()
        self.layer, self.k = layer, k

    def forward(self, x: Tensor) -> Tensor:
        layer, places, rows = self.layer, x.shape[2] * x.shape[3], []
        for image in x:
            for channel in range(x.shape[1]):
                patch = image[channel]
                if layer.training:
                    mean, var = x[:, channel].mean(), x[:, channel].var()
                else:
                    mean, var = layer.running_mean[channel], layer.running_var[channel]
                noise = var + layer.eps
                mean_step = F.softshrink(patch.mean() - mean, float(self.k * (noise / places).sqrt()))
                var_step = F.softshrink(patch.var() - var, float(self.k * noise * (2 / (places - 1)) ** 0.5))
                normal = (patch - mean - mean_step) / ((var + var_step).clamp(min=0) + layer.eps).sqrt()
                rows.append(normal * layer.weight[channel] + layer.bias[channel])
        if layer.training:
            layer(x)  # moves the running statistics
        return torch.stack(rows).view_as(x)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("k", [0.0, 1.0, 4.0])
def test_the_layer_equals_a_direct_implementation(training: bool, k: float) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(192, 4)).double()
    plain[0].running_mean.uniform_(-0.5, 0.5)
    plain[0].running_var.uniform_(0.5, 2)
    plain[0].momentum = 0.3
    network = Network(plain)
    network.norm.rule = InstanceAware(k, 0.3 if training else None)
    plain[0] = LiteralLayer(plain[0].train(training), k)
    x = torch.randn(5, 3, 8, 8, dtype=torch.float64) * 2 + 1
    assert (network(x).logits - plain(x)).abs().max() < 1e-9
    assert (network.module[0].running_mean - plain[0].layer.running_mean).abs().max() < 1e-12
    assert (network.module[0].running_var - plain[0].layer.running_var).abs().max() < 1e-12


def test_a_prediction_does_not_depend_on_its_batch() -> None:
    model = note()
    together, alone = model.predict(IMAGES[:8]), torch.cat([model.predict(image) for image in IMAGES[:8].split(1)])
    assert (together - alone).abs().max() < 1e-4


def test_a_large_k_is_plain_batch_norm() -> None:
    plain = tiny_network(torch.float32)
    with torch.no_grad():
        assert (note(k=1e9).predict(IMAGES[:8]) - plain(IMAGES[:8])).abs().max() < 1e-4
        assert (note(k=4.0).predict(IMAGES[:8]) - plain(IMAGES[:8])).abs().max() > 1e-2


def test_it_updates_every_so_many_images() -> None:
    model = note(update_every=10)
    updates = []
    for size in (4, 4, 4, 30, 7, 1):
        before = model.predict(IMAGES[:size])
        assert torch.equal(model(IMAGES[:size]), before)
        updates.append(model.last.updated)
    assert updates == [False, False, True, True, False, True]
    assert model.state_dict()["optimizer.bn1.weight/step"] == 5
    assert not torch.equal(model.model.bn1.running_mean, tiny_network(torch.float32).bn1.running_mean)
    assert model.trainable == [name for name in model.trainable if "bn" in name or "downsample.1" in name]


def test_reset_and_snapshot_are_exact(tmp_path: Path) -> None:
    model = note(update_every=16, capacity=20)
    start = [model(images) for images in IMAGES[:60].split(20)]
    model.save(tmp_path / "snapshot")
    back = dpl.load(tmp_path / "snapshot", tiny_network(torch.float32))
    for images in IMAGES[60:120].split(20):
        assert torch.equal(back(images), model(images))
    back.reset()
    assert all(torch.equal(back(x), logits) for x, logits in zip(IMAGES[:60].split(20), start, strict=True))


@pytest.mark.parametrize("size", [1, 2, 7])
@pytest.mark.parametrize("name", ["note", "note+dpl"])
def test_small_and_constant_batches_stay_finite(size: int, name: str) -> None:
    model = dpl.adapt(tiny_network(torch.float32), name, update_every=3, capacity=4)
    for images in (IMAGES[:size], torch.full_like(IMAGES[:size], 0.5), IMAGES[:1].repeat(size, 1, 1, 1)):
        for _ in range(4):
            assert model(images).isfinite().all()
    assert all(value.isfinite().all() for value in model.state_dict().values())


def test_features_without_spatial_positions_use_the_running_statistics() -> None:
    plain = nn.Sequential(nn.Flatten(), nn.Linear(768, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)).eval()
    model = dpl.adapt(plain, "note", update_every=8)
    with torch.no_grad():
        assert (model.predict(IMAGES[:8]) - plain(IMAGES[:8])).abs().max() < 1e-5
    assert model(IMAGES[:1]).isfinite().all()
    assert model(IMAGES[:16]).isfinite().all()


def test_another_norm_is_refused() -> None:
    with pytest.raises(SettingError, match="k= tunes it"):
        note(norm="batch")
