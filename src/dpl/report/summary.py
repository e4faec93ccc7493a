"""The figures of an experiment: accuracy, headline, cost, and signs of trouble; accuracies as tables for papers."""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from dpl.bench.tables import AVERAGE, frame, over_seeds
from dpl.core.errors import DataError
from dpl.core.files import write_file
from dpl.report.predictions import joined
from dpl.report.runs import UNKNOWN, Experiment, Run, Trace
from dpl.reproduce.document import latex

__all__ = [
    "AccuracyTable", "accuracy_table", "costs", "findings", "shown", "signed", "unlabelled_headline", "write_tables",
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
    scores: "pd.Series[float]"  # by which methods are ranked
    gains: "pd.Series[float]"  # points by which each method is better than the source model; NaN: not known

    def best(self, column: str) -> set[str]:
        """Return the methods with the highest figure as it is shown, if there are several to choose from."""
        figures = self.means[column].dropna().map(shown)
        return set(figures.index[figures == figures.max()]) if len(figures) > 1 else set()


def accuracy_table(experiment: Experiment) -> AccuracyTable:
    """Return the table of an experiment."""
    rows = frame(experiment.rows)
    columns = [*([AVERAGE] if len(experiment.streams) > 1 else []), *experiment.streams]
    means, deviations = (table[columns] for table in over_seeds(rows, "stream"))
    scores = means.iloc[:, 0]
    gains = scores - scores.get(experiment.reference, np.nan)
    return AccuracyTable(means, deviations, dict(zip(rows["stream"], rows["n"], strict=True)), scores, gains)


def unlabelled_headline(experiment: Experiment) -> list[tuple[str, str]]:
    """Return what is known without labels: confidence, agreement with the source model, use of its predictions."""
    stream, entries = experiment.streams[0], []
    for method in experiment.methods:
        trace = experiment.first(method, stream)
        if trace is None or method == experiment.reference:
            continue
        entries.append((f"{100 * trace.confidence.mean():.0f} %", f"mean confidence: {method}"))
        compared = trace[trace.source != UNKNOWN]
        if len(compared):
            same = 100 * float((compared.prediction == compared.source).mean())
            entries.append((f"{shown(same):.1f} %", "same prediction as the source model"))
    counts = [row["by_source"] for row in experiment.rows if row.get("by_source")]
    return entries + [(f"{count:,}", "images for which the guard used the source model") for count in counts]


def costs(experiment: Experiment) -> list[Any]:
    """Return a line for each method: means over its images, the highest peak, totals; NaN where nothing is recorded."""
    rates, sums = ["seconds_per_image", "gflops_per_image"], ["updates", "batches"]
    names = ["n", *rates, *sums, "peak_bytes", "trainable_values"]
    rows = frame(experiment.rows).set_index("label").reindex(columns=names).astype(float)
    by_method, images = rows.groupby("label"), rows[rates].notna().mul(rows["n"], axis=0)
    means = rows[rates].mul(images).groupby("label").sum(min_count=1) / images.groupby("label").sum()
    table = (
        by_method[sums]
        .sum()
        .assign(
            milliseconds=1000 * means["seconds_per_image"],
            gflops=means["gflops_per_image"],
            memory=by_method["peak_bytes"].max() / 2**20,
            trained=by_method["trainable_values"].first(),
        )
    )
    source = table.reindex([experiment.reference]).iloc[0]
    table["time_ratio"] = table["milliseconds"] / source["milliseconds"]
    table["passes"] = table["gflops"] / source["gflops"]  # arithmetic in forward passes of the source model
    return list(table.reindex(experiment.methods).rename_axis("method").reset_index().itertuples(index=False))


def findings(experiment: Experiment) -> dict[str, dict[str, list[str]]]:
    """Return the signs of trouble by method and stream, in words; of several seeds the first is examined."""
    unreadable = Counter[tuple[str, str]]()
    for row in experiment.rows:
        unreadable[row["label"], row["stream"]] += row.get("unreadable") or 0
    found: dict[str, dict[str, list[str]]] = {}
    for method, stream in product(experiment.methods, experiment.streams):
        trace = experiment.first(method, stream)
        signs = [] if trace is None or method == experiment.reference else _examine(experiment, trace)
        if count := unreadable[method, stream]:
            signs.append(f"{count:,} images could not be read")
        if signs:
            found.setdefault(method, {})[stream] = signs
    return found


def _examine(experiment: Experiment, trace: Trace) -> list[str]:
    compared = bool((trace.source != UNKNOWN).any())
    trace = trace[trace.source != UNKNOWN] if compared else trace
    third, labelled = len(trace) // 3, bool(trace.known.all())
    if not third or not (labelled or compared):
        return []
    last_third: Trace = trace[-third:]
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


# ---- Tables for papers: mean and deviation over seeds, as LaTeX and CSV ----

Tables = Sequence[tuple[Experiment, AccuracyTable]]


def write_tables(runs: Sequence[Run], page: Path, formats: Collection[str]) -> list[Path]:
    """Write the accuracies of all experiments beside the page, one file for each format."""
    experiments = [experiment for run in joined(runs) for experiment in run.experiments if experiment.labelled]
    if formats and not experiments:
        raise DataError(f"--{' --'.join(formats)}: the run has no accuracy, because no label is known")
    tables = [(experiment, accuracy_table(experiment)) for experiment in experiments]
    writers = {"latex": (_as_latex, ".tex"), "csv": (_as_csv, ".csv")}
    return [write_file(page.with_suffix(suffix), text(tables)) for text, suffix in map(writers.__getitem__, formats)]


def _as_latex(tables: Tables) -> str:
    """Return a tabular for each experiment (booktabs); nothing is bold, because a rank is no evidence."""
    parts = []
    for experiment, table in tables:
        deviations = table.deviations.map(lambda value: "" if pd.isna(value) else rf" $\pm$ {shown(value):.1f}")
        cells = table.means.map(lambda value: "--" if pd.isna(value) else f"{shown(value):.1f}") + deviations
        named = cells.rename(index=latex, columns=latex)
        parts.append(f"% {experiment.title}\n{named.to_latex(column_format='l' + 'r' * len(named.columns))}")
    return "\n".join(parts)


def _as_csv(tables: Tables) -> str:
    """Return a line for each method and stream, figures unrounded."""
    parts = []
    for experiment, table in tables:
        lines = table.means.rename_axis("method").reset_index().melt("method", var_name="stream", value_name="accuracy")
        lines.insert(0, "experiment", experiment.title)
        lines["deviation"] = table.deviations.melt()["value"]
        lines["seeds"] = lines["method"].map(frame(experiment.rows).groupby("label")["seed"].nunique())
        lines["images"] = lines["stream"].map(table.images).fillna(sum(table.images.values())).astype(int)
        parts.append(lines.iloc[lines["method"].map(table.means.index.get_loc).argsort(kind="stable")])
    return str(pd.concat(parts).to_csv(index=False))
