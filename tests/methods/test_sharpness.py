import pytest
import torch

from dpl.methods.parts.sharpness import ascended
from parity.tiny import stream, tiny_network


def test_parameters_move_by_rho_to_a_higher_loss_and_are_restored_exactly() -> None:
    network = tiny_network()
    parameters = list(network.parameters())
    start = [p.detach().clone() for p in parameters]
    loss = network(stream()[0]).square().mean()
    with ascended(parameters, loss, 0.05), torch.no_grad():
        moves = [p - s for p, s in zip(parameters, start, strict=True)]
        assert torch.cat([m.flatten() for m in moves]).norm().item() == pytest.approx(0.05, rel=1e-9)
        assert network(stream()[0]).square().mean() > loss
    assert all(torch.equal(p, s) for p, s in zip(parameters, start, strict=True))


def test_parameters_are_restored_after_an_error() -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    with pytest.raises(ZeroDivisionError), ascended([weight], weight.square().sum(), 0.1):
        _ = 1 / 0
    assert weight.tolist() == [1.0, 1.0, 1.0]


def test_a_constant_loss_moves_nothing() -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    with ascended([weight], (0 * weight).sum(), 0.1):
        assert weight.tolist() == [1.0, 1.0, 1.0]
