"""Linear layers over many tokens, as convolutions of one pixel: the same values and gradients."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from dpl.network import Network
from dpl.network.linear import _suits as suits
from dpl.network.linear import multiply

TOKENS = torch.randn(8, 130, 384, generator=torch.Generator().manual_seed(0))


@pytest.fixture(autouse=True)
def measured_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")


def weights(learn: bool = False, outputs: int = 400) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(1)
    weight, bias = torch.randn(outputs, 384, generator=draw) / 20, torch.randn(outputs, generator=draw)
    return weight.requires_grad_(learn), bias.requires_grad_(learn)


@pytest.mark.parametrize("biased", [True, False])
def test_values_and_gradients_are_the_librarys(biased: bool) -> None:
    weight, bias = weights()
    x = TOKENS.clone().requires_grad_(True)
    assert suits(x, weight, bias)
    ours, theirs = (f(x, weight, bias if biased else None) for f in (multiply, linear))
    assert ours.shape == theirs.shape
    assert ours.is_contiguous()
    assert torch.allclose(ours, theirs, rtol=1e-5, atol=1e-5)
    direction = torch.randn_like(theirs)
    found, expected = (torch.autograd.grad(y, x, direction)[0] for y in (ours, theirs))
    assert torch.allclose(found, expected, rtol=1e-5, atol=1e-5)


def test_what_learns_is_left_to_the_library() -> None:
    assert not suits(TOKENS, *weights(learn=True))
    with torch.no_grad():
        assert suits(TOKENS, *weights(learn=True))


def test_small_narrow_and_other_inputs_are_left_to_the_library() -> None:
    weight, bias = weights()
    assert not suits(TOKENS[:1], weight, bias)
    assert not suits(TOKENS.flatten(0, 1), weight, bias)
    assert not suits(TOKENS, *weights(outputs=96))
    assert not suits(TOKENS.double(), weight.double(), bias.double())
    assert not suits(TOKENS.transpose(0, 1), weight, bias)
    with torch.autocast("cpu", torch.bfloat16):
        assert not suits(TOKENS, weight, bias)


class Doubled(nn.Linear):
    """A layer with a forward pass of its own."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


@pytest.mark.parametrize("kind", [nn.Linear, Doubled])
def test_a_network_answers_the_same(kind: type[nn.Linear]) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(kind(384, 400), nn.GELU(), kind(400, 384), nn.Flatten(), nn.Linear(130 * 384, 5)).eval()
    ours = Network(module)
    with torch.no_grad():
        assert torch.allclose(ours.infer(TOKENS), module(TOKENS), rtol=1e-5, atol=1e-5)
