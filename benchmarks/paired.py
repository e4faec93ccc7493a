"""Paired differences between two rows of a benchmark: same source model, same images, same order.

A pair is one stream with one seed. Seeds of one stream are not independent of each other, so the bootstrap draws
streams first and then seeds of each. With few pairs a bootstrap is too narrow: then Student's t stands in.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy.stats import t as student

from dpl.bench import BenchContext, Store, read_grid
from dpl.bench.section import SHIPPED
from dpl.bench.tables import cell_rows, frame

RESAMPLES = 10_000
FEW = 6  # pairs below which the interval is Student's
POWER = 2.8  # standard errors: an effect of this size is found in 80 % of studies, at 5 % two-sided


@dataclass(frozen=True)
class Difference:
    """Mean difference in points, its 95 % interval, the number of pairs, and the smallest effect likely to be seen."""

    mean: float
    low: float
    high: float
    pairs: int
    smallest: float

    @property
    def is_clear(self) -> bool:
        """Whether the interval leaves out zero."""
        return self.low > 0 or self.high < 0

    def __str__(self) -> str:
        return f"{self.mean:+.1f} [{self.low:+.1f}, {self.high:+.1f}]"


def difference(values: pd.DataFrame, label: str, other: str) -> Difference:
    """Return `label` minus `other` over all streams and seeds that both have; `values` has a column for each label."""
    pairs = (values[label] - values[other]).dropna()
    if len(pairs) == 0:
        raise ValueError(f"{label} and {other} have no stream in common")
    return estimate(pairs)


def estimate(values: pd.Series) -> Difference:
    """Return the mean of paired values and its interval; the last level of the index is the seed."""
    streams = [group.to_numpy() for _, group in values.groupby(level=list(range(values.index.nlevels - 1)))]
    mean, count = float(np.mean([seeds.mean() for seeds in streams])), len(values)
    if count < FEW:
        error = float(values.std(ddof=1)) / np.sqrt(count) if count > 1 else np.nan
        wide, power = student.ppf([0.975, 0.8], max(count - 1, 1))
        return Difference(mean, mean - wide * error, mean + wide * error, count, float((wide + power) * error))
    drawn = _resampled(streams)
    scale = np.sqrt(len(streams) / (len(streams) - 1)) if len(streams) > 1 else 1.0  # few streams vary too little
    low, high = mean + scale * (np.quantile(drawn, [0.025, 0.975]) - mean)
    return Difference(mean, float(low), float(high), count, float(POWER * scale * drawn.std()))


def _resampled(streams: list[NDArray[np.float64]]) -> NDArray[np.float64]:
    """Return means of resamples: streams drawn with replacement, then seeds within each."""
    random = np.random.default_rng(0)
    total = np.zeros(RESAMPLES)
    for _ in streams:
        chosen = random.integers(0, len(streams), RESAMPLES)
        means = [s[random.integers(0, len(s), (RESAMPLES, len(s)))].mean(axis=1) for s in streams]
        total += np.stack(means)[chosen, np.arange(RESAMPLES)]
    return total / len(streams)


def finished_runs(name: str, data: Path, weights: Path, store: Path, columns: list[str]) -> pd.DataFrame:
    """Return one line for each finished run of a shipped experiment file, if there is any."""
    file = SHIPPED / f"{name}.yaml"
    grid = read_grid(file, BenchContext(data, weights, file.parent))
    lines = frame(cell_rows(grid.cells, Store(store))).reindex(columns=columns)
    lines = lines.round({"accuracy": 4, "confidence": 4})
    lines["column"] = lines["column"].astype(str).str.split("@").str[0]  # all corruptions have one severity
    return lines


def by_label(rows: pd.DataFrame, figure: str = "accuracy") -> pd.DataFrame:
    """Return a line for each section, stream and seed, a column for each label."""
    return rows.pivot_table(index=["section", "column", "seed"], columns="label", values=figure, sort=False)
