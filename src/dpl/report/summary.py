"""The figures of an experiment: accuracy, headline, cost, and signs of trouble."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from dpl.bench.tables import AVERAGE, frame, over_seeds
from dpl.report.runs import Experiment, PredictionTrace, paired
from dpl.reproduce.document import grouped

__all__ = [
    "AccuracyTable", "Finding", "accuracy_table", "costs", "findings", "shown", "signed", "skipped_updates",
    "unlabelled_headline",
]  # fmt: skip

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
    images: Mapping[str, int]
    reference: str | None

    @property
    def scores(self) -> "pd.Series[float]":
        """The figure by which methods are ranked."""
        return self.means.iloc[:, 0]

    @property
    def gains(self) -> "pd.Series[float]":
        """By how many points each method is better than the source model; NaN where that is not known."""
        return self.scores - self.scores.get(self.reference, np.nan)

    def best(self, column: str) -> set[str]:
        """Return the methods with the highest figure as it is shown, if there are several to choose from."""
        figures = self.means[column].dropna().map(shown)
        return set(figures.index[figures == figures.max()]) if len(figures) > 1 else set()


def accuracy_table(experiment: Experiment) -> AccuracyTable:
    """Return the table of an experiment."""
    rows = frame(experiment.rows)
    columns = [AVERAGE, *experiment.streams] if len(experiment.streams) > 1 else list(experiment.streams)
    means, deviations = (table[columns] for table in over_seeds(rows, "stream"))
    return AccuracyTable(means, deviations, dict(zip(rows["stream"], rows["n"], strict=True)), experiment.reference)


def unlabelled_headline(experiment: Experiment) -> list[tuple[str, str]]:
    """Return what is known without labels: confidence, agreement with the source model, use of its predictions."""
    stream, entries = experiment.streams[0], []
    for method in experiment.methods:
        traces = experiment.traces.get((method, stream), ())
        if not traces or method == experiment.reference:
            continue
        entries.append((f"{100 * traces[0].confidence.mean():.0f} %", f"mean confidence: {method}"))
        source = experiment.source_trace(stream, traces[0].seed)
        if source is not None:
            first, second = paired(source, traces[0])
            same = 100 * float((first.prediction == second.prediction).mean())
            entries.append((f"{shown(same):.1f} %", "same prediction as the source model"))
    counts = [row["by_source"] for row in experiment.rows if row.get("by_source")]
    return entries + [(f"{count:,}", "images for which the guard used the source model") for count in counts]


def costs(experiment: Experiment) -> list[Any]:
    """Return a line for each method: means over its images, the highest peak, totals; NaN where nothing is recorded."""
    names = ("n", "seconds_per_image", "gflops_per_image", "peak_bytes", "batches", "updates", "trainable_values")
    values = frame([{name: row.get(name) for name in names} for row in experiment.rows]).astype(float)
    labels = [row["label"] for row in experiment.rows]
    grouped = values.groupby(labels)
    total = values.mul(values["n"], axis=0).groupby(labels).sum(min_count=1)  # of each figure over all images
    images = values.notna().mul(values["n"], axis=0).groupby(labels).sum()
    means = total / images
    table = pd.DataFrame(
        {
            "milliseconds": 1000 * means["seconds_per_image"],
            "gflops": means["gflops_per_image"],
            "memory": grouped["peak_bytes"].max() / 2**20,
            "updates": grouped["updates"].sum(),
            "batches": grouped["batches"].sum(),
            "trained": grouped["trainable_values"].first(),
        }
    ).reindex(experiment.methods)
    source = table.reindex([experiment.reference]).iloc[0]
    table["time_ratio"] = table["milliseconds"] / source["milliseconds"]
    table["passes"] = table["gflops"] / source["gflops"]  # arithmetic in forward passes of the source model
    return list(table.rename_axis("method").reset_index().itertuples(index=False))


class Finding(NamedTuple):
    """One sign of trouble: a sentence, and a few characters for a table."""

    text: str
    short: str


def findings(experiment: Experiment) -> dict[str, dict[str, list[Finding]]]:
    """Return the signs of trouble by method and stream; of several seeds the first is examined."""
    unreadable: Counter[tuple[str, str]] = Counter()
    for row in experiment.rows:
        unreadable[row["label"], row["stream"]] += row.get("unreadable") or 0
    found: dict[str, dict[str, list[Finding]]] = {}
    for method in experiment.methods:
        for stream in experiment.streams:
            traces = experiment.traces.get((method, stream), ())
            signs = _examine(experiment, stream, traces[0]) if traces and method != experiment.reference else []
            if count := unreadable[method, stream]:
                signs.append(Finding(f"{count:,} images could not be read", f"{count:,} unreadable"))
            if signs:
                found.setdefault(method, {})[stream] = signs
    return found


def _examine(experiment: Experiment, stream: str, trace: PredictionTrace) -> list[Finding]:
    source = experiment.source_trace(stream, trace.seed)
    if source is not None:
        source, trace = paired(source, trace)
    third = len(trace) // 3
    if not third:
        return []
    found = _collapse(experiment, trace, source)
    if source is not None and bool(trace.known.all()):
        gains = 100.0 * (trace.correct.astype(float) - source.correct)
        first, last, end = (float(part.mean()) for part in (gains[:third], gains[-third:], gains))
        if end < -_POINTS_BELOW:
            found.append(Finding(f"ends {-end:.1f} points below the source model", f"−{-end:.1f}"))
        if last < first - _POINTS_LOST and last < 0:
            text = f"{signed(first)} points against the source model in the first third, {signed(last)} in the last"
            found.append(Finding(f"falls behind: {text}", "falling"))
    return found


def _collapse(experiment: Experiment, trace: PredictionTrace, source: PredictionTrace | None) -> list[Finding]:
    """Report a class that is predicted far more often in the last third than would be expected."""
    third = len(trace) // 3
    counts = np.bincount(trace.prediction[-third:], minlength=len(experiment.classes))
    top = int(counts.argmax())
    share = float(counts[top] / counts.sum())
    if trace.known[-third:].all():
        reference = trace.label
    elif source is not None:
        reference = source.prediction
    else:
        return []
    expected = float((reference[-third:] == top).mean())
    if share < _COLLAPSE_SHARE or share < _COLLAPSE_RATIO * expected:
        return []
    name = experiment.classes[top] if top < len(experiment.classes) else f"class {top}"
    text = f"predicts {name} for {share:.0%} of the last third; {expected:.0%} would be expected"
    return [Finding(text, f"{share:.0%} {name}")]


def skipped_updates(experiment: Experiment) -> list[tuple[str, int, int, str]]:
    """Return method, batches without an update, all batches and the commonest reason, of methods that train."""
    found = []
    for method, rows in grouped((row["label"], row) for row in experiment.rows if row.get("trainable_values")).items():
        skipped, batches = (sum(row.get(name) or 0 for row in rows) for name in ("skipped", "batches"))
        reasons = sum((Counter(row.get("skipped_because") or {}) for row in rows), Counter[str]())
        if skipped:
            found.append((method, skipped, batches, reasons.most_common(1)[0][0] if reasons else "not recorded"))
    return found
