import numpy as np
import pytest
import torch
from torch import Tensor

from dpl.estimate.signals import assigned_probability


def by_linear_program(probabilities: Tensor, balance: Tensor, slack: float) -> float:
    """The same problem, solved by a library."""
    optimize = pytest.importorskip("scipy.optimize")
    p, pi = probabilities.double().numpy(), balance.double().numpy()
    rows, classes = p.shape
    deviation = slack * np.sqrt(rows * pi * (1 - pi))
    of_row, of_class = np.kron(np.eye(rows), np.ones((1, classes))), np.kron(np.ones((1, rows)), np.eye(classes))
    bounds = np.concatenate([rows * pi + deviation, -(rows * pi - deviation)]) + 1e-4
    solved = optimize.linprog(
        -p.ravel(), A_ub=np.vstack([of_class, -of_class]), b_ub=bounds, A_eq=of_row, b_eq=np.ones(rows), bounds=(0, 1)
    )
    return float(-solved.fun / rows)


@pytest.mark.parametrize("slack", [0.0, 2.0])
@pytest.mark.parametrize("skew", [0.0, 4.0])
@pytest.mark.parametrize(("rows", "classes"), [(60, 10), (40, 25)])
def test_the_optimum_of_the_linear_program_is_found(rows: int, classes: int, skew: float, slack: float) -> None:
    logits = 3 * torch.randn(rows, classes, generator=torch.Generator().manual_seed(rows))
    logits[:, 0] += skew
    p, balance = logits.softmax(dim=1), torch.full((classes,), 1 / classes)
    found = float(assigned_probability(p, balance, slack))
    expected = by_linear_program(p, balance, slack)
    assert expected - 1e-4 <= found <= expected + 0.005, "every price is an upper bound"


def test_a_collapsed_model_is_not_believed_unless_the_balance_is_its_own() -> None:
    p = torch.full((200, 10), 0.001)
    p[:, 3] = 0.991
    uniform, own = torch.full((10,), 0.1), p.mean(dim=0)
    assert assigned_probability(p, uniform) < 0.2
    assert assigned_probability(p, own) > 0.98


def test_many_problems_are_solved_at_once() -> None:
    p = torch.randn(3, 50, 7, generator=torch.Generator().manual_seed(0)).softmax(dim=2)
    balance = torch.randn(3, 7, generator=torch.Generator().manual_seed(1)).softmax(dim=1)
    together = assigned_probability(p, balance)
    assert together.tolist() == pytest.approx([float(assigned_probability(p[i], balance[i])) for i in range(3)])
