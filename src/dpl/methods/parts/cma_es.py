"""CMA-ES: minimise a function of which only the values can be seen, by sampling from an adapting normal distribution.

Hansen, The CMA Evolution Strategy: A Tutorial, arXiv:1604.00772, with negative weights ("active"). The constants are
the defaults of pycma 4.5, against which it is tested. All of its state is declared, and stays on its device.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dpl.core.state import Stateful

__all__ = ["CMAES"]


class CMAES(Stateful):
    """A search for the vector [n] with the smallest value."""

    mean: Tensor  # [n]
    sigma: Tensor  # step size
    covariance: Tensor  # C, [n, n]
    axes: Tensor  # B, eigenvectors of C as columns, of the last decomposition
    lengths: Tensor  # D, roots of its eigenvalues
    path: Tensor  # p_c, [n]
    sigma_path: Tensor  # p_sigma, [n]
    generation: int
    decomposed: int  # generation of the last decomposition

    def __init__(self, size: int, population: int, sigma: float, device: torch.device) -> None:
        super().__init__()
        self.size, self.population = size, population
        n = size
        where: dict[str, Any] = {"device": device, "dtype": torch.float64}
        raw = [math.log((population + 1) / 2) - math.log(i) for i in range(1, population + 1)]
        positive = sum(w for w in raw if w > 0)
        self.parents = sum(w > 0 for w in raw)
        self.mueff = mu = positive**2 / sum(w**2 for w in raw if w > 0)
        self.c1 = min(1, population / 6) * 2 / ((n + 1.3) ** 2 + mu)
        self.cmu = min(1 - self.c1, 2 * (0.25 + mu - 2 + 1 / mu) / ((n + 2) ** 2 + mu))
        self.cc = (4 + mu / n) / (n + 4 + 2 * mu / n)
        self.cs = min(0.5, (mu + 2) / (n + mu + 3))
        many = max(1, 3 * (1 - 0.5 ** (n / 9))) * ((mu - 1) / (n + 1)) ** 0.5
        self.damping = 1 + 2 * max(0, many - 1) + self.cs
        self.gap = 1 / (self.c1 + self.cmu) / n / 10  # generations between two decompositions
        self.weights = torch.tensor(self._scaled(raw, positive), **where)
        variances = torch.exp(1e-4 / n * torch.arange(n, **where))  # not quite equal: their order is then known
        self.declare(mean=torch.zeros(n, **where), sigma=torch.tensor(sigma, **where), generation=0, decomposed=0)
        self.declare(covariance=variances.diag(), axes=torch.eye(n, **where), lengths=variances.sqrt())
        self.declare(path=torch.zeros(n, **where), sigma_path=torch.zeros(n, **where))

    def _scaled(self, raw: list[float], positive: float) -> list[float]:
        """Return the weights: positive ones sum up to 1, negative ones to what keeps C positive definite."""
        negative = [-w for w in raw if w < 0]
        effective = sum(negative) ** 2 / sum(w**2 for w in negative)
        most = [1 + self.c1 / self.cmu, (1 - self.c1 - self.cmu) / self.cmu / self.size]
        total = min(*most, 1 + 2 * effective / (self.mueff + 2))
        return [w / positive if w > 0 else w * total / sum(negative) for w in raw]

    def move(self, transfer: Callable[[Tensor], Tensor]) -> None:
        """Follow to another device, always in float64."""

        def there(value: Tensor) -> Tensor:
            return value.to(transfer(value).device)

        super().move(there)
        self.weights = there(self.weights)

    def ask(self, draws: Tensor) -> Tensor:
        """Return candidates [k, n] for standard normal numbers [k, n]."""
        if self.generation >= self.decomposed + self.gap and self.generation > self.decomposed:
            self.covariance = (self.covariance + self.covariance.T) / 2
            values, self.axes = torch.linalg.eigh(self.covariance)
            self.lengths = values.clamp(min=torch.finfo(values.dtype).tiny).sqrt()
            self.decomposed = self.generation
        return self.mean + self.sigma * (draws * self.lengths) @ self.axes.T

    def tell(self, candidates: Tensor, values: Tensor, foreign: int = 0) -> None:
        """Learn from the values [k] of candidates [k, n]; the last `foreign` were not asked for, and may be cut."""
        n = self.size
        steps = (candidates - self.mean) / self.sigma
        if foreign:
            near = n**0.5 + 2 * n / (n + 2)
            excess = (self._whitened(steps[-foreign:]).norm(dim=1, keepdim=True) / near).clamp(min=1)
            steps = torch.cat([steps[:-foreign], steps[-foreign:] / excess])
        steps = steps[values.argsort()]
        shift = self.weights[: self.parents] @ steps[: self.parents]
        self.mean = self.mean + self.sigma * shift
        self.generation += 1
        progresses = self._follow(shift)
        self._learn_covariance(steps, progresses)
        expected = 2**0.5 * math.exp(math.lgamma((n + 1) / 2) - math.lgamma(n / 2))  # length of n normal numbers
        change = self.cs / self.damping * (self.sigma_path.norm() / expected - 1)
        self.sigma = self.sigma * change.clamp(-1, 1).exp()

    def _follow(self, shift: Tensor) -> Tensor:
        """Let both paths follow; return 0 where the step size is about to grow fast (p_c waits), else 1."""
        cs, cc = self.cs, self.cc
        whitened = self._whitened(shift[None])[0] * self.mueff**0.5
        self.sigma_path = (1 - cs) * self.sigma_path + (cs * (2 - cs)) ** 0.5 * whitened
        square = self.sigma_path.square().sum() / (1 - (1 - cs) ** (2 * self.generation)) / self.size
        progresses = (square < 2 + 4 / (self.size + 1)).to(shift.dtype)
        self.path = (1 - cc) * self.path + progresses * (cc * (2 - cc) * self.mueff) ** 0.5 * shift
        return progresses

    def _learn_covariance(self, steps: Tensor, progresses: Tensor) -> None:
        c1 = self.c1 * (1 - (1 - progresses) * self.cc * (2 - self.cc))
        spare = self.weights.new_zeros(
            max(0, len(steps) - self.population)
        )  # more candidates: the middle counts nothing
        weights = self.cmu * torch.cat([self.weights[: self.parents], spare, self.weights[self.parents :]])
        decay = 1 - c1 - weights.sum()
        bounded = self.size / (self._whitened(steps).norm(dim=1) + 1e-9) ** 2
        weights = torch.cat([c1[None], torch.where(weights < 0, weights * bounded, weights)])
        vectors = torch.cat([(self.c1 / c1).sqrt() * self.path[None], steps])
        self.covariance = decay * self.covariance + (weights * vectors.T) @ vectors

    def _whitened(self, vectors: Tensor) -> Tensor:
        """Return C^-1/2 v for each row."""
        return (vectors @ self.axes / self.lengths) @ self.axes.T
