"""The figures of an experiment: accuracy, headline, cost, and signs of trouble; accuracies as tables for papers."""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from dpl.bench.tables import AVERAGE, frame, over_seeds
from dpl.core.errors import DataError
from dpl.core.files import replacing, write_file
from dpl.report.predictions import joined
from dpl.report.runs import UNKNOWN, Experiment, Run, Trace
from dpl.reproduce.document import grouped, latex
from dpl.reproduce.plotting import axes

__all__ = [
    "AccuracyTable", "Finding", "accuracy_table", "costs", "findings", "shown", "signed", "skipped_updates",
    "unlabelled_headline", "write_tables",
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
        same = (trace.prediction == trace.source)[trace.source != UNKNOWN]
        if len(same):
            entries.append((f"{shown(100 * float(same.mean())):.1f} %", "same prediction as the source model"))
    counts = [row["by_source"] for row in experiment.rows if row.get("by_source")]
    return entries + [(f"{count:,}", "images for which the guard used the source model") for count in counts]


def costs(experiment: Experiment) -> list[Any]:
    """Return a line for each method: means over its images, the highest peak, totals; NaN where nothing is recorded."""
    names = ("n", "seconds_per_image", "gflops_per_image", "peak_bytes", "batches", "updates", "trainable_values")
    values = frame([{name: row.get(name) for name in names} for row in experiment.rows]).astype(float)
    labels = [row["label"] for row in experiment.rows]
    grouped = values.groupby(labels)
    total = values.mul(values["n"], axis=0).groupby(labels).sum(min_count=1)  # of each figure over all images
    means = total / values.notna().mul(values["n"], axis=0).groupby(labels).sum()
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
            trace = experiment.first(method, stream)
            signs = [] if trace is None or method == experiment.reference else _examine(experiment, trace)
            if count := unreadable[method, stream]:
                signs.append(Finding(f"{count:,} images could not be read", f"{count:,} unreadable"))
            if signs:
                found.setdefault(method, {})[stream] = signs
    return found


def _examine(experiment: Experiment, trace: Trace) -> list[Finding]:
    compared = bool((trace.source != UNKNOWN).any())
    if compared:
        trace = trace[trace.source != UNKNOWN]
    third = len(trace) // 3
    if not third:
        return []
    found = _collapse(experiment, trace, compared)
    if compared and bool(trace.known.all()):
        gains = 100.0 * (trace.correct.astype(float) - (trace.source == trace.label))
        first, last, end = (float(part.mean()) for part in (gains[:third], gains[-third:], gains))
        if end < -_POINTS_BELOW:
            found.append(Finding(f"ends {-end:.1f} points below the source model", f"−{-end:.1f}"))
        if last < first - _POINTS_LOST and last < 0:
            text = f"{signed(first)} points against the source model in the first third, {signed(last)} in the last"
            found.append(Finding(f"falls behind: {text}", "falling"))
    return found


def _collapse(experiment: Experiment, trace: Trace, compared: bool) -> list[Finding]:
    """Report a class that is predicted far more often in the last third than would be expected."""
    last = slice(-(len(trace) // 3), None)
    labelled = trace.known[last].all()
    if not (labelled or compared):
        return []
    counts = np.bincount(trace.prediction[last])
    top = int(counts.argmax())
    share = float(counts[top] / counts.sum())
    expected = float(((trace.label if labelled else trace.source)[last] == top).mean())
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


# ---- Tables for papers: mean and deviation over seeds, as LaTeX, CSV and a picture ----

Tables = Sequence[tuple[Experiment, AccuracyTable]]


def write_tables(runs: Sequence[Run], page: Path, formats: Collection[str]) -> list[Path]:
    """Write the accuracies of all experiments beside the page, one file for each format."""
    experiments = [experiment for run in joined(runs) for experiment in run.experiments if experiment.labelled]
    if formats and not experiments:
        raise DataError(f"--{' --'.join(formats)}: the run has no accuracy, because no label is known")
    tables = [(experiment, accuracy_table(experiment)) for experiment in experiments]
    return [write(tables, page.with_suffix(suffix)) for write, suffix in (_WRITERS[name] for name in formats)]


def _write_latex(tables: Tables, path: Path) -> Path:
    """Write a tabular for each experiment (booktabs); nothing is bold, because a rank is no evidence."""
    parts = []
    for experiment, table in tables:
        deviations = table.deviations.map(lambda value: "" if pd.isna(value) else rf" $\pm$ {shown(value):.1f}")
        cells = table.means.map(lambda value: "--" if pd.isna(value) else f"{shown(value):.1f}") + deviations
        named = cells.rename(index=latex, columns=latex)
        parts.append(f"% {experiment.title}\n{named.to_latex(column_format='l' + 'r' * len(named.columns))}")
    return write_file(path, "\n".join(parts))


def _write_csv(tables: Tables, path: Path) -> Path:
    """Write a line for each method and stream, figures unrounded."""
    parts = []
    for experiment, table in tables:
        lines = table.means.rename_axis("method").reset_index().melt("method", var_name="stream", value_name="accuracy")
        lines.insert(0, "experiment", experiment.title)
        lines["deviation"] = table.deviations.melt()["value"]
        lines["seeds"] = lines["method"].map(frame(experiment.rows).groupby("label")["seed"].nunique())
        lines["images"] = lines["stream"].map(table.images).fillna(sum(table.images.values())).astype(int)
        parts.append(lines.iloc[lines["method"].map(table.means.index.get_loc).argsort(kind="stable")])
    return write_file(path, pd.concat(parts).to_csv(index=False))


def _write_png(tables: Tables, path: Path) -> Path:
    """Draw a panel for each experiment: a dot with its deviation for each method, small dots for single streams."""
    height = 1.0 + sum(0.6 + 0.25 * len(table.means) for _, table in tables)
    figure, grid = axes(len(tables), 1, height=height)
    for axis, (experiment, table) in zip(grid.flat, tables, strict=True):
        places = range(len(table.means))
        for stream in table.means.columns[1:]:
            axis.plot(table.means[stream], places, ".", color="#bbbbbb")
        axis.errorbar(table.scores, places, xerr=table.deviations.iloc[:, 0].fillna(0), fmt="o", color="#0072b2")
        axis.set_yticks(places, table.means.index)
        axis.invert_yaxis()
        axis.set_title(experiment.title, fontsize=9)
        axis.set_xlabel(f"accuracy (%), {table.scores.name}; bars: standard deviation over seeds")
    with replacing(path) as draft:
        figure.savefig(draft, dpi=150, format="png")
    return path


_WRITERS = {"latex": (_write_latex, ".tex"), "csv": (_write_csv, ".csv"), "png": (_write_png, ".png")}
