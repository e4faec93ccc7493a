"""The accuracy table of an experiment: measured figures, and beside them what the paper prints for the same."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import fmean, stdev

from dpl.report.model import Experiment
from dpl.reproduce import paper
from dpl.reproduce.facts import differences
from dpl.reproduce.layouts import LAYOUTS, Layout
from dpl.reproduce.paper import Table

__all__ = ["AVERAGE", "AccuracyTable", "Figure", "Printed", "accuracy_table"]

AVERAGE = "average"


@dataclass(frozen=True)
class Figure:
    """Accuracy in percent: mean over seeds, and its standard deviation where there are several."""

    value: float
    deviation: float | None
    seeds: int
    parts: int = 1
    """Streams that it is the mean of."""


@dataclass(frozen=True)
class Printed:
    """A figure of the paper as an accuracy, and where it stands."""

    value: float
    place: str
    streams: int = 1
    """Streams that it is the mean of."""


@dataclass(frozen=True)
class AccuracyTable:
    """By method and column; columns are the streams, then their average where there are several.

    A printed figure for several streams is found under `AVERAGE`.
    """

    columns: tuple[str, ...]
    measured: Mapping[tuple[str, str], Figure]
    printed: Mapping[tuple[str, str], Printed]
    images: Mapping[str, int]
    notes: tuple[str, ...] = field(default=())

    def best(self, column: str) -> set[str]:
        """Return the methods with the highest figure as it is shown."""
        shown = {m: round(f.value, 1) for (m, c), f in self.measured.items() if c == column}
        top = max(shown.values(), default=None)
        return {m for m, value in shown.items() if value == top} if len(shown) > 1 else set()


def accuracy_table(experiment: Experiment) -> AccuracyTable:
    """Return the table; an average counts only methods that have every stream."""
    streams = experiment.streams
    measured: dict[tuple[str, str], Figure] = {}
    for method in experiment.methods:
        series = {stream: found for stream in streams if (found := experiment.figures(method, stream))}
        measured |= {(method, stream): _figure(values) for stream, values in series.items()}
        seeds = set.intersection(*map(set, series.values())) if len(series) == len(streams) else set()
        if len(streams) > 1 and seeds:
            means = {seed: fmean(values[seed] for values in series.values()) for seed in sorted(seeds)}
            measured[method, AVERAGE] = _figure(means, len(streams))
    printed, notes = _printed(experiment) if "dataset" in experiment.rows[0] else ({}, ())
    columns = (*streams, AVERAGE) if len(streams) > 1 else streams
    images = {row["stream"]: int(row["n"]) for row in experiment.rows}
    return AccuracyTable(columns, measured, printed, images, notes)


def _figure(values: Mapping[int, float], parts: int = 1) -> Figure:
    figures = list(values.values())
    return Figure(fmean(figures), stdev(figures) if len(figures) > 1 else None, len(figures), parts)


def _printed(experiment: Experiment) -> tuple[dict[tuple[str, str], Printed], tuple[str, ...]]:
    """Look every method up in the paper's tables; the first one that prints it counts."""
    found: dict[tuple[str, str], Printed] = {}
    notes: list[str] = []
    for name, layout in LAYOUTS.items():
        table = paper.load(name)
        fresh = {key: cell for key, cell in _of_table(experiment, table, layout).items() if key not in found}
        if fresh and name != "supervised":
            found |= fresh
            notes += [f"{_title(table)} of the paper: {_scope(table, layout)}", *differences(table, experiment.rows)]
    return found, tuple(dict.fromkeys(notes))


def _of_table(experiment: Experiment, table: Table, layout: Layout) -> dict[tuple[str, str], Printed]:
    places = {row["stream"]: place[0] for row in experiment.rows if (place := layout.place(row)) is not None}
    if set(places) != set(experiment.streams):
        return {}
    if layout.streams == 1:
        columns = places
    else:
        column = _average_column(table, set(places.values()))
        columns = {} if column is None else {AVERAGE: column}
    return {
        (method, ours): Printed(
            _as_accuracy(table, cell.value), f"{_title(table)}: {table.metric} {cell.value:g} %", layout.streams
        )
        for ours, theirs in columns.items()
        if theirs in table.columns
        for method in experiment.methods
        if (cell := table.value(method, theirs)) is not None and cell.misprint is None
    }


def _average_column(table: Table, columns: set[str]) -> str | None:
    """Return the column that stands for all of these: the only one, or the average of exactly them."""
    if len(columns) == 1:
        return next(iter(columns))
    return next((name for name, members in table.averages.items() if set(members) == columns), None)


def _as_accuracy(table: Table, value: float) -> float:
    return 100 - value if table.metric == "error" else value


def _title(table: Table) -> str:
    return table.name.replace("table", "Table ")


def _scope(table: Table, layout: Layout) -> str:
    mean = f"each figure is a mean of {layout.streams} streams" if layout.streams > 1 else "figure by figure"
    turned = "; printed as errors, shown here as 100 minus the error" if table.metric == "error" else ""
    return f"{table.title}; {mean}{turned}."
