"""Convolutions that leave samples without a gradient out: the same gradients, less work."""

import copy

import pytest
import torch
from torch import Tensor, nn

import dpl
from dpl.network import rows
from dpl.network.rows import install_convolutions, uninstall_convolutions


class Framed(nn.Conv2d):
    """A convolution that calls the function itself, as networks ported from other libraries do."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.conv2d(nn.functional.pad(x, (0, 1, 0, 1)), self.weight, self.bias, self.stride)


def net(norm: type[nn.Module] = nn.BatchNorm2d) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1, bias=False), norm(16), nn.ReLU(inplace=True),
        Framed(16, 24, 2, stride=2), norm(24), nn.ReLU(inplace=True),
        nn.Conv2d(24, 24, 5, padding=2, groups=24), nn.Conv2d(24, 48, 1), norm(48), nn.Hardtanh(0, 6),
        nn.MaxPool2d(2), nn.Conv2d(48, 48, 5, padding=2, groups=48), nn.Conv2d(48, 48, 3, dilation=2, padding="same"),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(48, 5),
    ).eval()  # fmt: skip


IMAGES = torch.rand(8, 3, 16, 16, generator=torch.Generator().manual_seed(1))


def gradients(module: nn.Module, images: Tensor, chosen: list[int]) -> list[Tensor]:
    images = images.clone().requires_grad_(True)
    loss = module(images)[chosen].square().sum()
    return list(torch.autograd.grad(loss, [images, *module.parameters()]))


@pytest.fixture(autouse=True)
def everything_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "_SMALL", 0)
    monkeypatch.setattr(rows, "_DENSE", 0)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("chosen", [[1, 4, 5], [7], [], list(range(8)), list(range(7))])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_gradients_are_the_same(layout: torch.memory_format, chosen: list[int], dtype: torch.dtype) -> None:
    plain = net().to(dtype, memory_format=layout)
    fast, images = copy.deepcopy(plain), IMAGES.to(dtype).contiguous(memory_format=layout)
    install_convolutions(fast)
    for ours, theirs in zip(gradients(fast, images, chosen), gradients(plain, images, chosen), strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-5, atol=1e-6)


def test_samples_that_meet_in_batch_statistics_are_all_propagated() -> None:
    plain = net().train()
    fast = copy.deepcopy(plain)
    install_convolutions(fast)
    for ours, theirs in zip(gradients(fast, IMAGES, [0, 3]), gradients(plain, IMAGES, [0, 3]), strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-4, atol=1e-6)


def test_only_samples_with_a_gradient_are_convolved_back(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []
    original = rows._gradients

    def counting(gradient: Tensor, *rest: object) -> object:
        sizes.append(len(gradient))
        return original(gradient, *rest)

    monkeypatch.setattr(rows, "_gradients", counting)
    fast = net()
    install_convolutions(fast)
    gradients(fast, IMAGES, [2, 6, 7])
    assert sizes == [3] * 5  # all but the one whose padding is a word


def test_a_gradient_at_a_single_place_is_found() -> None:
    gradient = torch.zeros(4, 6, 9, 9)
    gradient[2, 5, 3, 4] = -1e-30
    gradient[3, 0, 8, 8] = float("nan")
    assert rows.rows_with_gradient(gradient).tolist() == [2, 3]
    assert rows.rows_with_gradient(torch.ones(4, 6, 9, 9)) is None


def test_second_derivatives() -> None:
    layer = nn.Conv2d(2, 4, 3, padding=1).double()
    install_convolutions(layer)
    mask = torch.tensor([1.0, 0.0, 1.0, 0.0], dtype=torch.float64)[:, None, None, None]
    x = torch.rand(4, 2, 5, 5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda y: layer(y) * mask, x)
    assert torch.autograd.gradgradcheck(lambda y: (layer(y) * mask).square(), x)


def test_keys_stay_and_classes_come_back() -> None:
    module, plain = net(), net()
    install_convolutions(module)
    install_convolutions(module)
    assert module.state_dict().keys() == plain.state_dict().keys()
    assert all(isinstance(layer, type(other)) for layer, other in zip(module, plain, strict=True))
    uninstall_convolutions(module)
    assert [type(layer) for layer in module] == [type(layer) for layer in plain]


@pytest.mark.parametrize("method", ["pl", "dpl", "dpl_dagger", "tent", "shot_im"])
def test_methods_adapt_alike(method: str) -> None:
    batches = torch.rand(4, 8, 3, 16, 16, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        confidence = float(net()(batches[0]).softmax(dim=1).amax(dim=1).median())
    settings = {"confidence": confidence} if method in ("pl", "dpl", "dpl_dagger") else {}
    fast, plain = (dpl.adapt(net(), method, lr=1e-3, **settings) for _ in range(2))
    uninstall_convolutions(plain.model)
    for batch in batches:
        assert torch.allclose(fast(batch), plain(batch), atol=1e-5)
    assert any(not torch.equal(a, b) for a, b in zip(fast.model.parameters(), net().parameters(), strict=True))
