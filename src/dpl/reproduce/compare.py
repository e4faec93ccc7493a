"""A table of the paper with measured figures beside the printed ones: means, coverage, ranks, gains, footnotes."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from statistics import mode
from string import ascii_lowercase
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from dpl.bench.tables import frame
from dpl.core.errors import SettingError
from dpl.reproduce.layouts import Layout, Row
from dpl.reproduce.paper import Improvement, PrintedCell, Table

__all__ = ["CellText", "ComparisonTable", "column_group", "compare", "oracle", "seed_means"]

_MARKS = [*ascii_lowercase, *map("".join, product(ascii_lowercase, repeat=2))]  # a, b ... z, aa, ab ...
_WIDE = 8  # a table with more columns leaves out groups in which nothing was measured
_LAST_DIGIT = "The printed cells' mean rounds to another last digit; unrounded cells could give the printed one."


@dataclass(frozen=True)
class Measured:
    """A figure in percent: over seeds, the mean and the standard deviation of the mean over streams."""

    value: float
    deviation: float | None
    """Sample standard deviation over seeds; None for one seed."""
    seeds: tuple[int, ...]
    images: int
    """Predictions behind the figure, for one seed."""
    parts: int
    """Streams (domains, corruptions) that went in."""
    expected: int
    """Streams that the paper's figure stands for."""


class SeedMeans(NamedTuple):
    """One value per seed, the mean over `parts` streams of so many images."""

    values: "pd.Series[float]"
    images: int
    parts: int

    def summary(self, expected: int) -> Measured:
        """Return mean and deviation over the seeds; `expected` streams are behind the paper's figure."""
        deviation = float(self.values.std()) if len(self.values) > 1 else None
        seeds = tuple(int(seed) for seed in self.values.index)
        return Measured(float(self.values.mean()), deviation, seeds, self.images, self.parts, expected)


@dataclass(frozen=True)
class Footnote:
    """A mark on a printed figure, and its text."""

    mark: str
    text: str


@dataclass(frozen=True)
class Column:
    """One column: `images` is the count behind most of its measured figures, None where nothing was measured."""

    name: str
    digits: int
    signed: bool = False
    images: int | None = None

    def format(self, figure: Measured | PrintedCell) -> tuple[str, str]:
        """Return a figure with the decimals of the column, and its deviation."""
        value = f"{figure.value:{'+' if self.signed else ''}.{self.digits}f}"
        return value, "" if figure.deviation is None else f"{figure.deviation:.2f}"


class CellText(NamedTuple):
    """A figure as every format shows it: `82.1`, `0.32`, `3/4` of the streams, what it stands for, rank, marks."""

    figure: str
    deviation: str
    rank: int | None
    coverage: str = ""
    scope: str = ""
    """What went into the figure, where it is less or other than the column's."""
    marks: tuple[str, ...] = ()


@dataclass(frozen=True)
class Entry:
    """One cell; a rank is 1 for the best of the column, 2 for the second best, None for the others."""

    measured: Measured | None
    reported: PrintedCell | None
    measured_rank: int | None = None
    reported_rank: int | None = None
    marks: tuple[str, ...] = ()
    """Footnotes on the printed figure."""

    def texts(self, column: Column) -> tuple[CellText | None, CellText | None]:
        """Return the texts of the measured and of the printed figure, None where there is none."""
        ours, theirs = self.measured, self.reported
        coverage = "" if ours is None or ours.parts == ours.expected else f"{ours.parts}/{ours.expected}"
        images = "" if ours is None or ours.images == column.images else f"{ours.images:,} images"
        scope = ", ".join(filter(None, (coverage, images)))
        return (
            CellText(*column.format(ours), self.measured_rank, coverage, scope) if ours else None,
            CellText(*column.format(theirs), self.reported_rank, marks=self.marks) if theirs else None,
        )


@dataclass(frozen=True)
class ComparisonRow:
    """One method: `label` is its name in the paper, empty for a method that the paper's table lacks."""

    name: str
    label: str
    entries: tuple[Entry, ...]

    @property
    def printed(self) -> bool:
        """Whether the paper prints any of its figures; a method of one's own has one line instead of two."""
        return any(entry.reported for entry in self.entries)

    @property
    def other_label(self) -> str:
        """The paper's name of the method where it differs from ours."""
        return "" if self.label.lower() == self.name.lower() else self.label


@dataclass(frozen=True)
class ComparisonTable:
    """A whole table as data, before any format."""

    name: str
    title: str
    metric: str
    columns: tuple[Column, ...]
    rows: tuple[ComparisonRow, ...]
    footnotes: tuple[Footnote, ...]
    left_out: tuple[str, ...] = ()
    """Groups of columns that are not shown because nothing of them was measured."""

    @property
    def shown_footnotes(self) -> list[Footnote]:
        """The footnotes whose mark stands in a column that is shown."""
        marks = {mark for row in self.rows for entry in row.entries for mark in entry.marks}
        return [note for note in self.footnotes if note.mark in marks]

    def texts(self, row: ComparisonRow) -> tuple[list[CellText | None], list[CellText | None]]:
        """Return the two lines of a method: measured and printed figures."""
        pairs = [entry.texts(column) for entry, column in zip(row.entries, self.columns, strict=True)]
        return [ours for ours, _ in pairs], [theirs for _, theirs in pairs]


Place = tuple[str, str]
"""Method and column."""
Values = dict[Place, Measured]


def compare(table: Table, rows: Sequence[Row]) -> ComparisonTable:
    """Return the table with measured figures beside the printed ones.

    Rows are those of the paper, then methods that only the experiment has, where the table is open to them. An average
    counts the streams that went in, and a gain is computed where both its figures stand for the same streams.
    """
    return _compare(table, rows, table.title, "accuracy")


def oracle(table: Table, rows: Sequence[Row]) -> ComparisonTable | None:
    """Return the same table for the settings that were best on the target, None where they were not searched."""
    found = [row for row in rows if "oracle_accuracy" in row]
    title = f"{table.title}: with the settings that are best on the target (oracle)"
    return _compare(table, found, title, "oracle_accuracy") if found else None


def _compare(table: Table, rows: Sequence[Row], title: str, figure: str) -> ComparisonTable:
    cells = seed_means(rows, table.layout, figure, as_error=table.metric == "error")
    extra = [name for name, _ in cells if name not in table.rows] if table.layout.open_rows else []
    names = tuple(dict.fromkeys((*table.rows, *extra)))
    values = _values(table, names, cells)
    columns = [_column(table, column, names, values) for column in table.columns]
    shown = _shown(columns)
    marks, footnotes = _footnotes(table)
    entries = [_entries(table, column, names, values, marks) for column in shown]
    lines = zip(names, zip(*entries, strict=True), strict=True)
    body = tuple(ComparisonRow(name, table.printed_as.get(name, ""), line) for name, line in lines)
    left_out = tuple(dict.fromkeys(column_group(column.name) for column in columns if column not in shown))
    return ComparisonTable(table.name, title, table.metric, tuple(shown), body, footnotes, left_out)


def seed_means(
    rows: Sequence[Row], layout: Layout, figure: str = "accuracy", *, as_error: bool = False
) -> dict[Place, SeedMeans]:
    """Return one value per seed for every method and column that has a measurement.

    Only seeds that ran on the same streams are averaged: those with most of them, of equals those of the earliest.
    """
    placed = [
        {**row, "cell": place[0], "stream": place[1], "value": 100 - row[figure] if as_error else row[figure]}
        for row in rows
        if (place := layout.place(row)) is not None
    ]
    grouped = frame(placed).groupby(["label", "cell"], sort=False) if placed else ()
    return {(str(label), str(cell)): _cell(members) for (label, cell), members in grouped}


def _cell(streams: pd.DataFrame) -> SeedMeans:
    """Return the mean over the streams of a cell, for each seed that has all of them."""
    _refuse_two(streams)
    once = streams.drop_duplicates(["seed", "stream"])
    table = once.pivot(index="seed", columns="stream", values="value")
    there = table.notna()
    fullest: Any = there.sum(axis=1).idxmax()
    values = table[there.eq(there.loc[fullest]).all(axis=1)].mean(axis=1)
    images = int(once.loc[once["seed"] == fullest, "n"].sum())
    return SeedMeans(values, images, int(there.loc[fullest].sum()))


def _refuse_two(streams: pd.DataFrame) -> None:
    """Raise where two experiments would fill the same cell: their mean would be neither's."""
    units = streams.drop_duplicates(["seed", "stream", "unit"])
    for (seed, _), same in units[units.duplicated(["seed", "stream"], keep=False)].groupby(["seed", "stream"]):
        first, other = same.iloc[0], same.iloc[1]
        raise SettingError(
            f"{first['label']}: the sections {first['section']!r} and {other['section']!r} both measured "
            f"{other['dataset']}/{other['domains'][0]} with seed {seed}; keep one of them in the experiment file"
        )


def _values(table: Table, names: Sequence[str], cells: Mapping[Place, SeedMeans]) -> Values:
    """Return every measured figure: cells, averages, gains."""
    found = dict(cells)
    expected = dict.fromkeys(table.columns, table.layout.streams)
    for column, members in table.averages.items():
        expected[column] = sum(expected[member] for member in members)
        for name in names:
            present = [found[name, member] for member in members if (name, member) in found]
            if (average := _average(present)) is not None:
                found[name, column] = average
    values = {place: means.summary(expected[place[1]]) for place, means in found.items() if place[1] in expected}
    for column, gain in table.improvements.items():
        values |= _gains(table.metric, names, column, gain, values)
    return values


def _average(members: Sequence[SeedMeans]) -> SeedMeans | None:
    """Return the average over columns for the seeds that all of them share."""
    if not members:
        return None
    shared = pd.concat([member.values for member in members], axis=1, join="inner").sort_index()
    images, parts = sum(member.images for member in members), sum(member.parts for member in members)
    return None if shared.empty else SeedMeans(shared.mean(axis=1), images, parts)


def _gains(metric: str, names: Sequence[str], column: str, gain: Improvement, values: Values) -> Values:
    """Return by how much each row is better than the one it is compared with."""
    found = {}
    for name in names:
        reference = gain.reference(name)
        own, other = values.get((name, gain.column)), values.get((reference, gain.column))
        if own is None or other is None or reference == name or own.parts != other.parts or own.seeds != other.seeds:
            continue
        better = other.value - own.value if metric == "error" else own.value - other.value
        found[name, column] = replace(own, value=better, deviation=None)
    return found


def _column(table: Table, name: str, rows: Sequence[str], values: Values) -> Column:
    counts = [values[row, name].images for row in rows if (row, name) in values]
    return Column(name, table.digits(name), name in table.improvements, mode(counts) if counts else None)


def _shown(columns: Sequence[Column]) -> list[Column]:
    """Return the columns to show: all, or of a wide table those of groups in which something was measured."""
    groups = {column_group(column.name) for column in columns if column.images is not None} - {""}
    if len(columns) <= _WIDE or not groups:
        return list(columns)
    return [column for column in columns if column_group(column.name) in groups | {""}]


def column_group(column: str) -> str:
    """Return the beginning of a name such as `cifar10_c/5` or `clipart->real`, empty for others."""
    return re.split("/|->", column)[0] if re.search("/|->", column) else ""


def _entries(
    table: Table, column: Column, names: Sequence[str], values: Values, marks: Mapping[Place, tuple[str, ...]]
) -> list[Entry]:
    """Return a column with its best two among the measured and among the printed figures; a gain is not ranked."""
    places = [(name, column.name) for name in names]
    measured, printed = [values.get(place) for place in places], [table.cells.get(place) for place in places]
    widest = max((own.parts for own in measured if own), default=0)
    # A mean over fewer streams competes with nobody, nor does a figure that cannot be right.
    ours = [own.value if own and own.parts == widest else None for own in measured]
    theirs = [cell.value if cell and not cell.misprint else None for cell in printed]
    ranks = [_best_two(figures, table.metric, column) for figures in (ours, theirs)]
    return [
        Entry(own, cell, first, second, marks.get(place, ()))
        for place, own, cell, first, second in zip(places, measured, printed, *ranks, strict=True)
    ]


def _best_two(figures: Sequence[float | None], metric: str, column: Column) -> list[int | None]:
    """Return the first and the second by the figures as shown; equals share a rank, and all equal have none."""
    shown = pd.Series(np.array(figures, dtype=float)).map(lambda value: round(value, column.digits))
    if column.signed or shown.nunique() < 2:
        return [None] * len(figures)
    ranks = shown.rank(method="dense", ascending=metric == "error")
    return [int(rank) if rank <= 2 else None for rank in ranks]


def _footnotes(table: Table) -> tuple[dict[Place, tuple[str, ...]], tuple[Footnote, ...]]:
    """Return the marks of each cell and the notes that they refer to; equal notes share a mark."""
    names: dict[str, str] = {}
    marks = {}
    for (row, column), cell in table.cells.items():
        texts = [f"Misprint in the paper ({row}, {column}): {cell.misprint}."] if cell.misprint else []
        texts += [_LAST_DIGIT] if (row, column) in table.last_digit else []
        texts += [f"{row}, {column}: {note}" for note in cell.notes]
        for text in texts:
            names.setdefault(text, _MARKS[len(names)])
        if texts:
            marks[row, column] = tuple(names[text] for text in texts)
    return marks, tuple(Footnote(mark, text) for text, mark in names.items())
