"""Source, PL, TENT, DPL and the default on the same stream of digits, several orders, with the paper's Figure 1."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from dpl.demo.digits import uci_digits
from dpl.model.adaptive import DEFAULT_METHOD, adapt
from dpl.reproduce.plotting import axes, draw_runs
from dpl.runs.online import OnlineResult, evaluate

__all__ = ["METHODS", "DemoRow", "run_demo", "write_picture"]

BATCH_SIZE = 32
_SKIPPED = 32  # images at the beginning, where the mean over a handful says nothing

# Everything but the loss is the same for PL and DPL: all parameters, running statistics, Adam 1e-4, alpha 0.9.
METHODS: dict[str, dict[str, Any]] = {
    "source": {},
    "pl": {"lr": 1e-4},
    "tent": {},
    "dpl": {"lr": 1e-4},
    DEFAULT_METHOD: {},
}


class DemoRow(NamedTuple):
    """One method: means over the stream orders, in percent, and the accuracy after each image of each order."""

    method: str
    accuracy: float
    accuracy_range: float
    last_400: float
    ms_per_image: float
    curves: list[NDArray[np.float64]]


def run_demo(network: nn.Module, seeds: int, on_batch: Callable[[str, OnlineResult], None]) -> list[DemoRow]:
    """Stream the target digits in `seeds` random orders through every method, each time from the source model."""
    images, labels = uci_digits()
    rows = []
    for method, settings in METHODS.items():
        model = adapt(network, method, **settings)
        results = []
        for seed in range(seeds):
            model.reset()
            order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
            stream = ((images[batch], labels[batch]) for batch in torch.split(order, BATCH_SIZE))
            results.append(evaluate(model, stream, partial(on_batch, method)))
        accuracies = [result.accuracy for result in results]
        last = float(np.mean([result.tail(400) for result in results]))
        milliseconds = 1000 * sum(result.seconds for result in results) / (seeds * len(labels))
        curves = [result.cumulative() for result in results]
        mean, spread = float(np.mean(accuracies)), float(np.ptp(accuracies))
        rows.append(DemoRow(method, mean, spread, last, milliseconds, curves))
    return rows


def write_picture(rows: list[DemoRow], path: Path) -> Path:
    """Draw cumulative accuracy over the stream: the mean over orders as a line, their range as a band."""
    figure, grid = axes()
    draw_runs(grid[0][0], {row.method: [c[_SKIPPED:] for c in row.curves] for row in rows}, {}, start=_SKIPPED + 1)
    grid[0][0].set(xlabel="images seen", ylabel="cumulative accuracy (%)")
    count = len(rows[0].curves)
    figure.suptitle(f"Trained on MNIST, streaming UCI digits: mean and range of {count} orders", fontsize=10)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    return path
