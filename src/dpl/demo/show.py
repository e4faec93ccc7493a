"""Source, PL, TENT, DPL and the default on the same stream of digits, several orders, with the paper's Figure 1."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dpl.demo.digits import uci_digits
from dpl.model.adaptive import DEFAULT_METHOD, adapt
from dpl.reproduce.plotting import cumulative_accuracy
from dpl.runs.online import OnlineResult, evaluate

__all__ = ["METHODS", "DemoRow", "run_demo", "write_picture"]

BATCH_SIZE = 32
LAST = 400  # images at the end of the stream, for the final accuracy

# Everything but the loss is the same for PL and DPL: all parameters, running statistics, Adam 1e-4, alpha 0.9.
METHODS: dict[str, dict[str, Any]] = {
    "source": {},
    "pl": {"lr": 1e-4},
    "tent": {},
    "dpl": {"lr": 1e-4},
    DEFAULT_METHOD: {},
}


@dataclass(frozen=True)
class DemoRow:
    """One method over all stream orders."""

    method: str
    results: list[OnlineResult]

    @property
    def accuracy(self) -> tuple[float, float]:
        """Mean and range of the online accuracy over the orders."""
        return _mean_and_range([result.accuracy for result in self.results])

    @property
    def tail(self) -> tuple[float, float]:
        """Mean and range of the accuracy over the last images."""
        return _mean_and_range([result.tail(LAST) for result in self.results])

    @property
    def milliseconds(self) -> float:
        """Mean time for each image."""
        images = sum(len(result.labels) for result in self.results)
        return 1000 * sum(result.seconds for result in self.results) / images


def run_demo(
    network: nn.Module, seeds: int, on_batch: Callable[[str, OnlineResult], None], limit: int | None = None
) -> list[DemoRow]:
    """Stream the target digits in `seeds` random orders through every method, each time from the source model.

    `limit` keeps only the first so many digits.
    """
    images, labels = (part[:limit] for part in uci_digits())
    rows = []
    for method, settings in METHODS.items():
        model = adapt(network, method, **settings)
        results = []
        for seed in range(seeds):
            model.reset()
            result = evaluate(model, _stream(images, labels, seed), partial(on_batch, method))
            results.append(result)
        rows.append(DemoRow(method, results))
    return rows


def write_picture(rows: list[DemoRow], path: Path) -> Path:
    """Draw cumulative accuracy over the stream."""
    curves = {row.method: [result.cumulative() for result in row.results] for row in rows}
    count = len(rows[0].results)
    title = f"Trained on MNIST, streaming UCI digits: mean and range of {count} orders"
    return cumulative_accuracy({"": curves}, path, title)


def _stream(images: Tensor, labels: Tensor, seed: int) -> list[tuple[Tensor, Tensor]]:
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    return [
        (images[order[i : i + BATCH_SIZE]], labels[order[i : i + BATCH_SIZE]]) for i in range(0, len(order), BATCH_SIZE)
    ]


def _mean_and_range(values: list[float]) -> tuple[float, float]:
    return float(np.mean(values)), float(np.ptp(values))
