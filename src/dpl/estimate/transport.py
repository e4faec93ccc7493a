"""The mean probability under the best assignment of rows to classes that keeps a class balance."""

import torch
from torch import Tensor

__all__ = ["assigned_probability"]

_STEPS = 100  # of the ascent; the result is then within half a point (tests/estimate)


def assigned_probability(probabilities: Tensor, balance: Tensor, slack: float = 2.0) -> Tensor:
    """Assign each row to one class, class k to n pi_k rows within `slack` binomial deviations; return the mean [...].

    Args:
        probabilities: [..., n, C].
        balance: pi, expected share of each class [..., C].
        slack: standard deviations by which the count of a class may differ.

    A linear program, solved in its dual: a price for each class, raised where too many rows want it and lowered where
    too few do. Every price gives an upper bound; the smallest found is returned.
    """
    p, pi = probabilities.double(), balance.double()
    rows = p.shape[-2]
    deviation = slack * (pi * (1 - pi) / rows).sqrt()
    fewest, most = (pi - deviation).clamp(min=0), (pi + deviation).clamp(max=1)
    price, best = torch.zeros_like(pi), torch.full(p.shape[:-2], torch.inf, dtype=p.dtype, device=p.device)
    for step in range(_STEPS):
        value, wanted = (p - price[..., None, :]).max(dim=-1)
        bound = value.mean(dim=-1) + torch.where(price > 0, price * most, price * fewest).sum(dim=-1)
        best = torch.minimum(best, bound)
        share = torch.zeros_like(pi).scatter_add_(-1, wanted, torch.ones_like(value)) / rows
        excess = (share - most).clamp(min=0) - (fewest - share).clamp(min=0)
        slope = torch.where(price > 0, share - most, torch.where(price < 0, share - fewest, excess))
        size = slope.norm(dim=-1, keepdim=True).clamp(min=1e-12)
        price = price + 0.5 / (1 + step) ** 0.75 * slope / size
    return best
