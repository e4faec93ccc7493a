"""Winograd's minimal filtering: the library's values and gradients, with fewer multiplications."""

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import conv2d

import dpl
from dpl.network import Network, processor, rows, winograd
from dpl.network.norm import Batch
from dpl.network.winograd import convolve, suits


def maps(count: int, channels: int, height: int, width: int, dtype: torch.dtype = torch.float32) -> Tensor:
    draw = torch.Generator().manual_seed(height)
    found = torch.randn(count, channels, height, width, generator=draw, dtype=dtype)
    return found.contiguous(memory_format=torch.channels_last)


@pytest.fixture(autouse=True)
def on_any_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processor, "_PROCESSORS", (torch.backends.cpu.get_cpu_capability(),))


def net() -> nn.Sequential:
    torch.manual_seed(0)
    wide = nn.Conv2d(128, 160, 3, padding=1)
    return nn.Sequential(
        nn.Conv2d(3, 128, 3, padding=1), nn.BatchNorm2d(128), nn.ReLU(), wide, nn.BatchNorm2d(160), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(160, 5),
    ).to(memory_format=torch.channels_last).eval()  # fmt: skip


@pytest.mark.parametrize("at_once", [1, 1 << 23])
@pytest.mark.parametrize("size", [(7, 7), (14, 10), (5, 8), (1, 1), (2, 3)])
def test_values_and_gradients_are_the_librarys(
    size: tuple[int, int], at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(winograd, "_AT_ONCE", at_once)
    x = maps(3, 6, *size, dtype=torch.float64).requires_grad_(True)
    weight, bias = torch.randn(5, 6, 3, 3, dtype=torch.float64), torch.randn(5, dtype=torch.float64)
    ours, theirs = convolve(x, weight, bias), conv2d(x, weight, bias, padding=1)
    direction = torch.randn_like(theirs)
    assert torch.allclose(ours, theirs, atol=1e-12)
    assert ours.is_contiguous(memory_format=torch.channels_last)
    found, expected = (torch.autograd.grad(y, x, direction)[0] for y in (ours, theirs))
    assert torch.allclose(found, expected, atol=1e-12)


def test_rounding_errors_are_not_larger_than_the_librarys() -> None:
    x, weight = maps(4, 256, 14, 14), torch.randn(256, 256, 3, 3, generator=torch.Generator().manual_seed(0)) / 48
    exact = conv2d(x.double(), weight.double(), padding=1)
    ours, theirs = ((y - exact).square().mean().sqrt() for y in (convolve(x, weight), conv2d(x, weight, padding=1)))
    assert ours < 1e-6
    assert ours < 2 * theirs


def test_second_derivatives() -> None:
    weight = torch.randn(3, 2, 3, 3, dtype=torch.float64)
    x = torch.randn(1, 2, 4, 5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(lambda v: convolve(v, weight).square(), (x,))


def test_changed_weights_are_noticed() -> None:
    x, weight = maps(2, 4, 6, 6), torch.randn(3, 4, 3, 3)
    convolve(x, weight)
    with torch.no_grad():
        weight.mul_(2)
    assert torch.allclose(convolve(x, weight), conv2d(x, weight, padding=1), atol=1e-5)
    weight.data = torch.randn(3, 4, 3, 3)
    assert torch.allclose(convolve(x, weight), conv2d(x, weight, padding=1), atol=1e-5)


def test_the_kernel_is_transformed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Tensor] = []
    before = winograd.transformed
    monkeypatch.setattr(winograd, "transformed", lambda w: calls.append(w) or before(w))
    x, weight = maps(2, 4, 6, 6), torch.randn(3, 4, 3, 3)
    with torch.inference_mode():
        convolve(x, weight)
    x.requires_grad_(True)
    convolve(x, weight).sum().backward()
    assert len(calls) == 1
    assert x.grad is not None


@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv2d(128, 128, 3, padding=1, stride=2), nn.Conv2d(128, 128, 3), nn.Conv2d(128, 128, 5, padding=1),
        nn.Conv2d(128, 128, 3, padding=1, groups=2), nn.Conv2d(128, 128, 3, padding=1, dilation=2),
        nn.Conv2d(128, 128, 3, padding=1, padding_mode="reflect"), nn.Conv2d(128, 64, 3, padding=1),
        nn.Conv2d(128, 128, 3, padding="same"),
    ],
)  # fmt: skip
def test_other_convolutions_are_left_to_the_library(layer: nn.Conv2d) -> None:
    assert not suits(layer.requires_grad_(False), maps(8, 128, 12, 12))


def test_which_inputs_and_weights_suit() -> None:
    layer = nn.Conv2d(128, 128, 3, padding=1).requires_grad_(False)
    x = maps(8, 128, 12, 12)
    assert suits(layer, x)
    assert not suits(layer, x.contiguous())
    assert not suits(layer, x[:1])  # too few tiles
    assert not suits(layer, x.double())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert not suits(layer, x)
    assert not suits(layer.requires_grad_(True), x)


def test_a_network_gives_the_same_answers_and_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []
    monkeypatch.setattr(rows, "convolve", lambda *args: taken.append(1) or convolve(*args))
    images = maps(8, 3, 10, 10)
    plain = net().requires_grad_(False)
    ours = Network(plain)
    ours.train_only("affine")
    found = []
    for module in (ours.module, copy.deepcopy(plain)):
        scales = [layer.weight.requires_grad_(True) for layer in module if isinstance(layer, nn.BatchNorm2d)]
        with ours.norm.using(Batch()):
            logits = (module if module is ours.module else module.train())(images)
        found.append([logits, *torch.autograd.grad(logits.square().sum(), scales)])
    assert taken == [1]  # by our network alone
    for a, b in zip(*found, strict=True):
        assert torch.allclose(a, b, rtol=1e-5, atol=1e-5)


def test_a_teacher_whose_weights_follow_is_left_to_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Tensor] = []
    before = winograd.transformed
    monkeypatch.setattr(winograd, "transformed", lambda w: calls.append(w) or before(w))
    model = dpl.adapt(net(), "cotta", layout="channels_last", views=2)
    for _ in range(3):
        model(maps(8, 3, 10, 10).sigmoid())
    assert len(calls) <= 1  # of the source's weights, which stay


def test_tent_adapts_with_it_as_without(monkeypatch: pytest.MonkeyPatch) -> None:
    batches = [maps(8, 3, 10, 10 + i) for i in range(3)]
    with_it = dpl.adapt(net(), "tent", layout="channels_last")
    ours = torch.cat([with_it(batch) for batch in batches])
    monkeypatch.setattr(processor, "_PROCESSORS", ())
    without = dpl.adapt(net(), "tent", layout="channels_last")
    theirs = torch.cat([without(batch) for batch in batches])
    assert not torch.equal(ours, theirs)  # another way was taken
    assert torch.allclose(ours, theirs, rtol=1e-4, atol=1e-5)
