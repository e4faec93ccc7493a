"""The figures of an experiment: accuracy with the paper's figure beside it, cost, and signs of trouble."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from dpl.report.runs import Experiment, PredictionTrace, paired
from dpl.reproduce import paper
from dpl.reproduce.compare import Measured, SeedMeans, average
from dpl.reproduce.document import differences
from dpl.reproduce.layouts import LAYOUTS, Layout, Row
from dpl.reproduce.paper import Table

__all__ = [
    "AVERAGE", "AccuracyTable", "Cost", "Finding", "PrintedFigure", "accuracy_table", "costs", "findings", "headline",
    "shown", "signed", "skipped_updates",
]  # fmt: skip

AVERAGE = "average"

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
class PrintedFigure:
    """A figure of the paper as an accuracy, and where it is printed."""

    value: float
    place: str
    streams: int
    """Number of streams that it is the mean of."""


@dataclass(frozen=True)
class AccuracyTable:
    """Figures by method and column: the average first if there are several streams, then the streams.

    A printed figure for several streams is under `AVERAGE`.
    """

    columns: tuple[str, ...]
    measured: Mapping[tuple[str, str], Measured]
    printed: Mapping[tuple[str, str], PrintedFigure]
    images: Mapping[str, int]
    reference: str | None
    notes: tuple[str, ...] = ()

    def score(self, method: str) -> float | None:
        """Return the figure by which methods are ranked."""
        found = self.measured.get((method, self.columns[0]))
        return None if found is None else found.value

    def gain(self, method: str) -> float | None:
        """Return by how many points a method is better than the source model."""
        own, base = self.score(method), self.score(self.reference or "")
        return None if own is None or base is None or method == self.reference else own - base

    def best(self, column: str) -> set[str]:
        """Return the methods with the highest figure as it is shown, if there are several to choose from."""
        figures = {method: shown(found.value) for (method, name), found in self.measured.items() if name == column}
        top = max(figures.values(), default=None)
        return {method for method, figure in figures.items() if figure == top} if len(figures) > 1 else set()


def accuracy_table(experiment: Experiment) -> AccuracyTable:
    """Return the table; only methods that have every stream have an average."""
    streams = experiment.streams
    means: dict[tuple[str, str], SeedMeans] = {}
    for method in experiment.methods:
        own = {stream: found for stream in streams if (found := _seed_means(experiment, method, stream)) is not None}
        means |= {(method, stream): found for stream, found in own.items()}
        mean = average(list(own.values()), len(streams)) if 1 < len(streams) == len(own) else None
        if mean is not None:
            means[method, AVERAGE] = mean
    printed, notes = _printed(experiment) if "dataset" in experiment.rows[0] else ({}, ())
    return AccuracyTable(
        columns=(AVERAGE, *streams) if len(streams) > 1 else streams,
        measured={key: found.summary() for key, found in means.items()},
        printed=printed,
        images={row["stream"]: int(row["n"]) for row in experiment.rows},
        reference=experiment.reference,
        notes=notes,
    )


def _seed_means(experiment: Experiment, method: str, stream: str) -> SeedMeans | None:
    rows = [row for row in experiment.rows_of(method) if row["stream"] == stream and row.get("accuracy") is not None]
    values = pd.Series({row["seed"]: row["accuracy"] for row in rows}, dtype=float)
    return SeedMeans(values, rows[0]["n"], 1, 1) if rows else None


def _printed(experiment: Experiment) -> tuple[dict[tuple[str, str], PrintedFigure], tuple[str, ...]]:
    """Return the paper's figures, each from the first table that has it, and notes on their tables."""
    found: dict[tuple[str, str], PrintedFigure] = {}
    notes: list[str] = []
    for name, layout in LAYOUTS.items():
        table = paper.load(name)
        fresh = {key: cell for key, cell in _printed_in(table, layout, experiment).items() if key not in found}
        if fresh and name != "supervised":
            found |= fresh
            notes += [f"{_title(table)} of the paper: {_scope(table, layout)}", *differences(experiment.rows, layout)]
    return found, tuple(dict.fromkeys(notes))


def _printed_in(table: Table, layout: Layout, experiment: Experiment) -> dict[tuple[str, str], PrintedFigure]:
    """Return the figures of one table; a table that has no place for one of the streams has none."""
    found = {}
    for ours, theirs in _printed_columns(table, layout, experiment).items():
        for method in experiment.methods:
            cell = table.value(method, theirs)
            if cell is not None and cell.misprint is None:
                value = 100 - cell.value if table.metric == "error" else cell.value
                place = f"{_title(table)}: {table.metric} {cell.value:g} %"
                found[method, ours] = PrintedFigure(value, place, layout.streams)
    return found


def _printed_columns(table: Table, layout: Layout, experiment: Experiment) -> dict[str, str]:
    """Return the table's column for each of ours that it has."""
    places = {row["stream"]: place[0] for row in experiment.rows if (place := layout.place(row)) is not None}
    if set(places) != set(experiment.streams):
        return {}
    wanted = set(places.values())
    averages = [name for name in table.columns if {name} == wanted or set(table.averages.get(name, ())) == wanted]
    columns = places if layout.streams == 1 else {AVERAGE: name for name in averages[:1]}  # noqa: B035
    return {ours: theirs for ours, theirs in columns.items() if theirs in table.columns}


def _title(table: Table) -> str:
    return table.name.replace("table", "Table ")


def _scope(table: Table, layout: Layout) -> str:
    mean = f"each figure is a mean of {layout.streams} streams" if layout.streams > 1 else "figure by figure"
    turned = "; printed as errors, shown here as 100 minus the error" if table.metric == "error" else ""
    return f"{table.title}; {mean}{turned}."


def headline(experiment: Experiment, table: AccuracyTable | None) -> list[tuple[str, str]]:
    """Return the few figures at the top of an experiment, each with its description."""
    images = sum({row["stream"]: row["n"] for row in experiment.rows}.values())
    seeds, methods = len({row["seed"] for row in experiment.rows}), len(experiment.methods)
    streams = f"{len(experiment.streams)} streams" if len(experiment.streams) > 1 else "one stream"
    return [
        *(_unlabelled_headline(experiment) if table is None else _accuracy_headline(experiment, table)),
        (f"{images:,} images", f"{streams}, {seeds} {'seed' if seeds == 1 else 'seeds'}"),
        (f"{methods} {'method' if methods == 1 else 'methods'}", f"{len(experiment.classes):,} classes"),
    ]


def _accuracy_headline(experiment: Experiment, table: AccuracyTable) -> list[tuple[str, str]]:
    scores = {method: score for method in experiment.methods if (score := table.score(method)) is not None}
    if not scores:
        return []
    best = max(scores, key=lambda method: scores[method])
    what = "average accuracy" if table.columns[0] == AVERAGE else "accuracy"
    entries = [(f"{shown(scores[best]):.1f} %", f"best {what}: {best}")]
    gain = table.gain(best)
    if gain is not None:
        entries.append((f"{shown(scores[table.reference or '']):.1f} %", "the source model"))
        entries.append((signed(gain), "points over the source model"))
    return entries


def _unlabelled_headline(experiment: Experiment) -> list[tuple[str, str]]:
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


@dataclass(frozen=True)
class Cost:
    """Means over all images of a method; None where the run did not record it."""

    method: str
    milliseconds: float | None
    time_ratio: float | None
    """Time relative to the source model."""
    passes: float | None
    """Arithmetic in forward passes of the source model."""
    gflops: float | None
    memory: float | None
    """Peak in MiB."""
    batches: int
    updates: int
    trained: int | None


def costs(experiment: Experiment) -> list[Cost]:
    """Return the cost of every method."""
    reference = experiment.rows_of(experiment.reference or "")
    base_time, base_work = _mean(reference, "seconds_per_image"), _mean(reference, "gflops_per_image")
    return [_cost(method, experiment.rows_of(method), base_time, base_work) for method in experiment.methods]


def _cost(method: str, rows: Sequence[Row], base_time: float | None, base_work: float | None) -> Cost:
    seconds, gflops = _mean(rows, "seconds_per_image"), _mean(rows, "gflops_per_image")
    peaks = [row["peak_bytes"] for row in rows if row.get("peak_bytes")]
    return Cost(
        method=method,
        milliseconds=None if seconds is None else 1000 * seconds,
        time_ratio=_ratio(seconds, base_time),
        passes=_ratio(gflops, base_work),
        gflops=gflops,
        memory=max(peaks) / 2**20 if peaks else None,
        batches=_total(rows, "batches"),
        updates=_total(rows, "updates"),
        trained=next((row["trainable_values"] for row in rows if row.get("trainable_values") is not None), None),
    )


def _mean(rows: Sequence[Row], name: str) -> float | None:
    """Return the mean over images."""
    known = [(row[name], row["n"]) for row in rows if row.get(name) is not None and row.get("n")]
    return sum(value * n for value, n in known) / sum(n for _, n in known) if known else None


def _ratio(value: float | None, base: float | None) -> float | None:
    return value / base if value is not None and base else None


def _total(rows: Sequence[Row], name: str) -> int:
    return sum(row.get(name) or 0 for row in rows)


@dataclass(frozen=True)
class Finding:
    """One sign of trouble: a sentence, and a few characters for a table."""

    method: str
    stream: str
    text: str
    short: str


def findings(experiment: Experiment) -> list[Finding]:
    """Return the signs of trouble, method by method; of several seeds the first is examined."""
    found = []
    for method in experiment.methods:
        for stream in experiment.streams:
            traces = experiment.traces.get((method, stream), ())
            if traces and method != experiment.reference:
                found += [Finding(method, stream, *words) for words in _examine(experiment, stream, traces[0])]
    unreadable: Counter[tuple[str, str]] = Counter()
    for row in experiment.rows:
        unreadable[row["label"], row["stream"]] += row.get("unreadable") or 0
    return found + [
        Finding(method, stream, f"{count:,} images could not be read", f"{count:,} unreadable")
        for (method, stream), count in unreadable.items()
        if count
    ]


def _examine(experiment: Experiment, stream: str, trace: PredictionTrace) -> list[tuple[str, str]]:
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
            found.append((f"ends {-end:.1f} points below the source model", f"−{-end:.1f}"))
        if last < first - _POINTS_LOST and last < 0:
            text = f"{signed(first)} points against the source model in the first third, {signed(last)} in the last"
            found.append((f"falls behind: {text}", "falling"))
    return found


def _collapse(experiment: Experiment, trace: PredictionTrace, source: PredictionTrace | None) -> list[tuple[str, str]]:
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
    return [(text, f"{share:.0%} {name}")]


def skipped_updates(experiment: Experiment) -> list[tuple[str, int, int, str]]:
    """Return method, batches without an update, all batches and the commonest reason, of methods that train."""
    found = []
    for method in experiment.methods:
        rows = experiment.rows_of(method)
        skipped = _total(rows, "skipped")
        reasons: Counter[str] = Counter()
        for row in rows:
            reasons.update(row.get("skipped_because") or {})
        if skipped and any(row.get("trainable_values") for row in rows):
            reason = reasons.most_common(1)[0][0] if reasons else "not recorded"
            found.append((method, skipped, _total(rows, "batches"), reason))
    return found
