"""The figures of an experiment: accuracy, cost, and signs of trouble."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import pandas as pd

from dpl.bench.tables import AVERAGE, frame, over_seeds
from dpl.report.runs import UNKNOWN, Experiment, Trace
from dpl.reproduce.paper import Row

__all__ = ["AccuracyTable", "accuracy_table", "costs", "findings", "shown", "signed"]

# Signs of trouble; docs/report.md states these limits.
_POINTS_BELOW = 1.0  # percentage points below the source model at the end
_POINTS_LOST = 5.0  # percentage points of gain lost between the first and the last third
_COLLAPSE_SHARE = 0.4  # share of one class among the predictions for the last third
_COLLAPSE_RATIO = 2.0  # that share over the share of the class that would be expected


def shown(value: float) -> float:
    """Return a percentage as every part of the page shows it; noise of the last bits decides no rounding."""
    return round(round(value, 6), 1) + 0.0  # adding zero turns -0.0 into 0.0


def signed(value: float) -> str:
    """Return a difference in percentage points as the page shows it."""
    return f"{shown(value):+.1f}"


@dataclass(frozen=True)
class AccuracyTable:
    """Mean and deviation over seeds by method and column: the average first if there are several streams."""

    means: pd.DataFrame
    deviations: pd.DataFrame
    scores: "pd.Series[float]"  # by which methods are ranked
    gains: "pd.Series[float]"  # points by which each method is better than the source model; NaN: not known

    def best(self, column: str) -> set[str]:
        """Return the methods with the highest figure as it is shown, if there are several to choose from."""
        figures = self.means[column].dropna().map(shown)
        return set(figures.index[figures == figures.max()]) if len(figures) > 1 else set()


def accuracy_table(experiment: Experiment) -> AccuracyTable:
    """Return the table of an experiment."""
    columns = [*([AVERAGE] if len(experiment.streams) > 1 else []), *experiment.streams]
    means, deviations = (table[columns] for table in over_seeds(frame(experiment.rows), "stream"))
    scores = means.iloc[:, 0]
    gains = scores - scores.get(experiment.reference, np.nan)
    return AccuracyTable(means, deviations, scores, gains)


def costs(experiment: Experiment) -> list[Any]:
    """Return a line for each method: means over its images, the highest peak, totals; NaN where nothing is recorded."""
    rates, sums = ["seconds_per_image", "gflops_per_image"], ["updates", "batches"]
    names = ["n", *rates, *sums, "peak_bytes", "trainable_values"]
    rows = frame(experiment.rows).set_index("label").reindex(columns=names).astype(float)
    by_method, images = rows.groupby("label"), rows[rates].notna().mul(rows["n"], axis=0)
    means = rows[rates].mul(images).groupby("label").sum(min_count=1) / images.groupby("label").sum()
    table = by_method[sums].sum()
    table["milliseconds"] = 1000 * means["seconds_per_image"]
    table["gflops"] = means["gflops_per_image"]
    table["memory"] = by_method["peak_bytes"].max() / 2**20
    table["trained"] = by_method["trainable_values"].first()
    source = table.reindex([experiment.reference]).iloc[0]
    table["time_ratio"] = table["milliseconds"] / source["milliseconds"]
    table["passes"] = table["gflops"] / source["gflops"]  # arithmetic in forward passes of the source model
    return list(table.reindex(experiment.methods).rename_axis("method").reset_index().itertuples(index=False))


def findings(experiment: Experiment) -> list[tuple[str, str, str]]:
    """Return the signs of trouble: method, stream, and words; of several seeds the predictions of the first count."""
    noted = ((row["label"], row["stream"], text) for row in experiment.rows for text in _noted(row))
    found = [
        (method, stream, text)
        for method, stream in product(experiment.methods, experiment.streams)
        if method != experiment.reference and (trace := experiment.first(method, stream)) is not None
        for text in _examine(experiment, trace)
    ]
    return [*found, *dict.fromkeys(noted)]


def _noted(row: Row) -> Iterator[str]:
    """Yield what a run noted of itself."""
    if row.get("unreadable"):
        yield f"{row['unreadable']:,} images could not be read"
    if row.get("trainable_values") and row.get("updates") == 0:
        yield f"no update in {row['batches']:,} batches: {next(iter(row.get('skipped_because') or ['not recorded']))}"


def _examine(experiment: Experiment, trace: Trace) -> list[str]:
    compared = bool((trace.source != UNKNOWN).any())
    trace = trace[trace.source != UNKNOWN] if compared else trace
    third, labelled = len(trace) // 3, bool(trace.known.all())
    if not third or not (labelled or compared):
        return []
    last_third: Any = trace[-third:]
    found = _collapse(experiment, last_third, labelled)
    if compared and labelled:
        gains = 100.0 * (trace.correct.astype(float) - (trace.source == trace.label))
        first, last, end = (float(part.mean()) for part in (gains[:third], gains[-third:], gains))
        if end < -_POINTS_BELOW:
            found.append(f"ends {-end:.1f} points below the source model")
        if last < first - _POINTS_LOST and last < 0:
            text = f"{signed(first)} points against the source model in the first third, {signed(last)} in the last"
            found.append(f"falls behind: {text}")
    return found


def _collapse(experiment: Experiment, last: Trace, labelled: bool) -> list[str]:
    """Report a class that is predicted far more often in the last third than would be expected."""
    counts = np.bincount(last.prediction)
    top = int(counts.argmax())
    share, expected = counts[top] / len(last), float(((last.label if labelled else last.source) == top).mean())
    if share < _COLLAPSE_SHARE or share < _COLLAPSE_RATIO * expected:
        return []
    name = experiment.classes[top] if top < len(experiment.classes) else f"class {top}"
    return [f"predicts {name} for {share:.0%} of the last third; {expected:.0%} would be expected"]
