"""RoTTA's own logic: statistics, the bank's place in the stream, when it learns."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dpl
from dpl.core.errors import InputError
from dpl.memory.bank import occupied_by_age
from dpl.methods.rotta import robust_pass
from dpl.network import Network
from parity.tiny import stream, tiny_network

IMAGES = torch.cat(stream(torch.float32))


def rotta(**settings: Any) -> dpl.AdaptiveModel:
    return dpl.adapt(tiny_network(torch.float32), "rotta", **settings)


class RobustNorm(nn.Module):
    """The layer as the paper writes it."""

    def __init__(self, layer: nn.BatchNorm2d, share: float) -> None:
        super().__init__()
        self.weight, self.bias, self.eps, self.share = layer.weight, layer.bias, layer.eps, share
        self.mean, self.var = layer.running_mean.clone(), layer.running_var.clone()

    def forward(self, x: Tensor) -> Tensor:
        mean = (1 - self.share) * self.mean + self.share * x.mean(dim=(0, 2, 3))
        var = (1 - self.share) * self.var + self.share * x.var(dim=(0, 2, 3), correction=0)
        self.mean, self.var = mean.detach(), var.detach()
        x = (x - mean.view(1, -1, 1, 1)) / (var.view(1, -1, 1, 1) + self.eps).sqrt()
        return x * self.weight.view(1, -1, 1, 1) + self.bias.view(1, -1, 1, 1)


def test_a_robust_pass_moves_the_statistics_and_carries_their_gradient() -> None:
    plain = nn.Sequential(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten(), nn.Linear(6 * 14 * 14, 4))
    plain = plain.double().eval()
    network, images = Network(plain), IMAGES[:16].double()
    plain[1] = RobustNorm(plain[1], 0.2)
    for _ in range(3):  # the statistics of one pass are the next one's past
        ours, expected = robust_pass(network, images, 0.2).logits, plain(images)
        assert (ours - expected).abs().max() < 1e-12
    gradients = torch.autograd.grad(ours.square().sum(), list(network.module.parameters()))
    references = torch.autograd.grad(expected.square().sum(), list(plain.parameters()))
    assert all(((a - b).abs().max() < 1e-9) for a, b in zip(gradients, references, strict=True))
    assert (network.module[1].running_mean - plain[1].mean).abs().max() < 1e-12
    assert (network.module[1].running_var - plain[1].var).abs().max() < 1e-12


def test_it_updates_every_so_many_images_in_batches_of_any_size() -> None:
    model = rotta(update_every=10)
    updates = []
    for size in (4, 4, 4, 30, 7, 1):
        before = model.predict(IMAGES[:size])
        assert torch.equal(model(IMAGES[:size]), before)  # the output precedes all updates
        updates.append(model.last.updated)
    assert updates == [False, False, True, True, False, True]
    assert model.method.seen == 0
    assert model.state_dict()["optimizer.bn1.weight/step"] == 5


def test_the_bank_does_not_depend_on_how_the_stream_is_cut() -> None:
    whole, cut = rotta(update_every=1000), rotta(update_every=1000)
    whole(IMAGES[:200])
    for part in IMAGES[:200].split([1, 2, 50, 147]):
        cut(part)
    one, other = (model.method.samples[occupied_by_age(model.method.slots)] for model in (whole, cut))
    assert torch.equal(one, other)
    assert torch.equal(whole.method.ages.sort().values, cut.method.ages.sort().values)


def test_teacher_and_student_follow_different_statistics_and_share_what_is_frozen() -> None:
    model = rotta(update_every=32)
    model(IMAGES[:64])
    teacher, student, source = model.method.teacher.weights, model.model, tiny_network(torch.float32)
    assert teacher.conv1.weight is student.conv1.weight
    assert torch.equal(student.conv1.weight, source.conv1.weight)
    assert not torch.equal(teacher.bn1.running_mean, source.bn1.running_mean)
    assert not torch.allclose(teacher.bn1.running_mean, student.bn1.running_mean, atol=1e-5)
    assert (teacher.bn1.weight - source.bn1.weight).abs().max() < (student.bn1.weight - source.bn1.weight).abs().max()


def test_images_of_another_size_are_refused_before_anything_changes() -> None:
    model = rotta()
    model(IMAGES[:20])
    before = model.state_dict()
    with pytest.raises(InputError, match=r"\(3, 20, 20\)"):
        model(torch.rand(4, 3, 20, 20))
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    assert model.predict(torch.rand(4, 3, 20, 20)).shape == (4, 10)
    model.reset()
    assert model(torch.rand(4, 3, 20, 20)).shape == (4, 10)


def test_reset_and_snapshot_are_exact(tmp_path: Path) -> None:
    model = rotta(update_every=16)
    start = [model(images) for images in IMAGES[:60].split(20)]
    model.save(tmp_path / "snapshot")
    back = dpl.load(tmp_path / "snapshot", tiny_network(torch.float32))
    for images in IMAGES[60:120].split(20):
        assert torch.equal(back(images), model(images))
    back.reset()
    assert all(torch.equal(back(x), logits) for x, logits in zip(IMAGES[:60].split(20), start, strict=True))


@pytest.mark.parametrize("size", [1, 2, 7])
@pytest.mark.parametrize("name", ["rotta", "rotta+dpl"])
def test_small_and_constant_batches_stay_finite(size: int, name: str) -> None:
    network = tiny_network(torch.float32)
    before = torch.get_rng_state()
    model = dpl.adapt(network, name, update_every=3, capacity=4)
    for images in (IMAGES[:size], torch.full_like(IMAGES[:size], 0.5), IMAGES[:1].repeat(size, 1, 1, 1)):
        for _ in range(4):
            assert model(images).isfinite().all()
    assert all(value.isfinite().all() for value in model.state_dict().values())
    assert torch.equal(torch.get_rng_state(), before)


def test_a_network_without_batch_norm_is_updated() -> None:
    plain = nn.Sequential(nn.Flatten(), nn.Linear(768, 32), nn.LayerNorm(32), nn.ReLU(), nn.Linear(32, 10)).eval()
    model = dpl.adapt(plain, "rotta", update_every=16)
    model(IMAGES[:32])
    assert model.last.updated
    assert model.trainable == ["2.weight", "2.bias"]
    assert not torch.equal(model.model[2].weight, plain[2].weight)


def test_images_normalised_outside_the_network_are_refused_at_once() -> None:
    model = rotta()
    before = model.state_dict()
    with pytest.raises(InputError, match="normalise inside"):
        model(IMAGES[:4] * 4 - 2)
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    assert rotta(augment=lambda x: x)(IMAGES[:4] * 4 - 2).isfinite().all()
