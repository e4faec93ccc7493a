"""Clipped activations that remember their output: the same values and gradients, less memory."""

import copy

import pytest
import torch
from torch import Tensor, nn

import dpl
from dpl.network import Network
from dpl.network.clipping import Clipping


class Shifted(nn.ReLU6):
    """An activation with a forward of its own, which must be kept."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + 1)


def net(act: type[nn.Module] = nn.ReLU6, inplace: bool = True) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), act(inplace=inplace), nn.Linear(8, 8), nn.Hardtanh(-0.2, 0.3, inplace))


X = 8 * torch.randn(16, 6, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("inplace", [True, False])
@pytest.mark.parametrize("act", [nn.ReLU6, Shifted])
def test_values_and_gradients_are_the_same(act: type[nn.Module], inplace: bool) -> None:
    plain = net(act, inplace)
    ours = copy.deepcopy(plain)
    Clipping(ours)
    assert torch.equal(ours(X), plain(X))
    found, expected = ([*torch.autograd.grad(m(X).square().sum(), list(m.parameters()))] for m in (ours, plain))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_values_at_the_bounds_get_no_gradient() -> None:
    layer = nn.ReLU6()
    Clipping(layer)
    x = torch.tensor([-1.0, 0.0, 3.0, 6.0, 7.0], requires_grad=True)
    layer(x).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [0, 0, 1, 0, 0]


def test_second_derivatives() -> None:
    layer = nn.ReLU6(inplace=False).double()
    Clipping(layer)
    x = torch.tensor([-1.0, 0.5, 3.0, 7.0], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(lambda v: layer(v).square(), (x,))


def test_no_copy_of_the_input_is_kept() -> None:
    ours = net()
    Clipping(ours)
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        ours[1](ours[0](X))
    plain = net()
    more: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: more.append(t) or t, lambda t: t):
        hidden = plain[1](plain[0](X))
    ours_places, plain_places = ({t.data_ptr() for t in found if t.shape == hidden.shape} for found in (kept, more))
    assert hidden.data_ptr() not in plain_places  # the library's way holds the input's copy beside the output
    assert len(ours_places) == 1


def test_taken_twice_and_put_back() -> None:
    module = net()
    Clipping(module)
    twice = Clipping(module)
    assert type(module[1]) is not nn.ReLU6
    twice.remove()
    assert type(module[1]) is nn.ReLU6


def test_the_private_copy_alone_is_changed() -> None:
    original = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU6(True), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3)
    )
    model = dpl.adapt(original, "tent")
    model(torch.rand(4, 3, 8, 8))
    assert type(original[2]) is nn.ReLU6
    assert bool(model.last["updated"])


class Overwriting(nn.Module):
    """Adds to an activation's output in place, which the library's activation allows."""

    def __init__(self) -> None:
        super().__init__()
        self.act = nn.ReLU6(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.act(2 * x)
        y += x
        return y


def test_outputs_that_are_overwritten_get_the_librarys_activation() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(6, 8), Overwriting(), nn.Linear(8, 3))
    ours = Network(plain)
    found = torch.autograd.grad(ours(X).logits.square().sum(), list(ours.module.parameters()))
    expected = torch.autograd.grad(plain(X).square().sum(), list(plain.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert type(ours.module.get_submodule("1.act")) is nn.ReLU6


def test_a_trial_run_finds_such_outputs_too_and_keeps_none() -> None:
    torch.manual_seed(0)
    overwriting = Network(nn.Sequential(nn.Linear(6, 8), Overwriting(), nn.Linear(8, 3)))
    overwriting.differentiate(X)
    assert type(overwriting.module.get_submodule("1.act")) is nn.ReLU6
    usual = Network(net())
    usual.differentiate(X)
    assert usual._clipping.outputs is None, "every map of the trial would stay in memory"
