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
from dpl.reproduce.paper import Place, PrintedCell, Row, Table

__all__ = ["CellText", "ComparisonTable", "column_group", "compare", "oracle", "seed_means"]

_MARKS = [*ascii_lowercase, *map("".join, product(ascii_lowercase, repeat=2))]  # a, b ... z, aa, ab ...
_WIDE = 8  # a table with more columns leaves out groups in which nothing was measured
_LAST_DIGIT = "The printed cells' mean rounds to another last digit; unrounded cells could give the printed one."


@dataclass(frozen=True)
class Measured:
    """A figure in percent: over seeds, the mean and the standard deviation of the mean over streams."""

    value: float
    deviation: float | None  # sample standard deviation over seeds; None for one seed
    seeds: tuple[int, ...]
    images: int  # predictions behind the figure, for one seed
    parts: int  # streams (domains, corruptions) that went in
    expected: int  # streams that the paper's figure stands for


class SeedMeans(NamedTuple):
    """One value per seed, the mean over `parts` streams of so many images."""

    values: "pd.Series[float]"
    images: int
    parts: int


@dataclass(frozen=True)
class Footnote:
    """A mark on a printed figure, and its text."""

    mark: str
    text: str


class CellText(NamedTuple):
    """A figure as every format shows it: `82.1`, `0.32`, rank, `3/4` of the streams, what it stands for, marks."""

    figure: str
    deviation: str
    rank: int | None
    coverage: str = ""
    scope: str = ""  # what went into the figure, where it is less or other than the column's
    marks: tuple[str, ...] = ()


@dataclass(frozen=True)
class Column:
    """One column: `images` is the count behind most of its measured figures, None where nothing was measured."""

    name: str
    digits: int
    signed: bool = False
    images: int | None = None

    def text(self, figure: Measured | PrintedCell | None, rank: int | None, *more: Any) -> CellText | None:
        """Return a figure with the decimals of the column, and its deviation."""
        if figure is None:
            return None
        value = f"{figure.value:{'+' if self.signed else ''}.{self.digits}f}"
        return CellText(value, "" if figure.deviation is None else f"{figure.deviation:.2f}", rank, *more)


@dataclass(frozen=True)
class Entry:
    """One cell; a rank is 1 for the best of the column, 2 for the second best, None for the others."""

    measured: Measured | None
    reported: PrintedCell | None
    measured_rank: int | None
    reported_rank: int | None
    marks: tuple[str, ...]  # footnotes on the printed figure


@dataclass(frozen=True)
class ComparisonRow:
    """One method: `label` is its name in the paper, empty for a method that the paper's table lacks."""

    name: str
    label: str
    entries: tuple[Entry, ...]


@dataclass(frozen=True)
class ComparisonTable:
    """A whole table as data, before any format."""

    name: str
    title: str
    metric: str
    columns: tuple[Column, ...]
    rows: tuple[ComparisonRow, ...]
    footnotes: tuple[Footnote, ...]
    left_out: tuple[str, ...] = ()  # groups of columns that are not shown because nothing of them was measured

    @property
    def shown_footnotes(self) -> list[Footnote]:
        """The footnotes whose mark stands in a column that is shown."""
        marks = {mark for row in self.rows for entry in row.entries for mark in entry.marks}
        return [note for note in self.footnotes if note.mark in marks]

    def lines(self, row: ComparisonRow) -> list[tuple[str, str, str, list[CellText | None]]]:
        """Return a method's name, the paper's where it differs, `measured`, the figures; then the paper's, if any."""
        measured, reported = [], []
        for entry, column in zip(row.entries, self.columns, strict=True):
            ours, theirs = entry.measured, entry.reported
            coverage = f"{ours.parts}/{ours.expected}" if ours and ours.parts != ours.expected else ""
            images = f"{ours.images:,} images" if ours and ours.images != column.images else ""
            scope = ", ".join(filter(None, (coverage, images)))
            measured.append(column.text(ours, entry.measured_rank, coverage, scope))
            reported.append(column.text(theirs, entry.reported_rank, "", "", entry.marks))
        label = "" if row.label.lower() == row.name.lower() else row.label
        lines = [(row.name, label, "measured", measured), ("", "", "reported", reported)]
        return lines if any(reported) else lines[:1]


Cell = tuple[str, str]  # method and column
Values = dict[Cell, Measured]


def oracle(table: Table, rows: Sequence[Row]) -> ComparisonTable | None:
    """Return the same table for the settings that were best on the target, None where they were not searched."""
    found = [row for row in rows if "oracle_accuracy" in row]
    title = f"{table.title}: with the settings that are best on the target (oracle)"
    return compare(table, found, "oracle_accuracy", title) if found else None


def compare(table: Table, rows: Sequence[Row], figure: str = "accuracy", title: str = "") -> ComparisonTable:
    """Return the table with measured figures beside the printed ones.

    Rows are those of the paper, then methods that only the experiment has, where the table is open to them. An average
    counts the streams that went in, and a gain is computed where both its figures stand for the same streams.
    """
    cells = seed_means(rows, table.layout.place, figure, as_error=table.metric == "error")
    extra = [name for name, _ in cells] if table.layout.open_rows else []
    names = tuple(dict.fromkeys((*table.rows, *extra)))
    values = _values(table, names, cells)
    marks, footnotes = _footnotes(table)
    columns = {}
    for name in table.columns:
        counts = [values[row, name].images for row in names if (row, name) in values]
        column = Column(name, table.digits(name), name in table.improvements, mode(counts) if counts else None)
        columns[column] = _entries(table, column, names, values, marks)
    groups = {column_group(column.name) for column in columns if column.images is not None} - {""}
    shown = columns
    if len(columns) > _WIDE and groups:
        shown = {column: own for column, own in columns.items() if column_group(column.name) in groups | {""}}
    lines = zip(names, zip(*shown.values(), strict=True), strict=True)
    body = tuple(ComparisonRow(name, table.printed_as.get(name, ""), entries) for name, entries in lines)
    left_out = tuple(dict.fromkeys(column_group(column.name) for column in columns if column not in shown))
    return ComparisonTable(table.name, title or table.title, table.metric, tuple(shown), body, footnotes, left_out)


def seed_means(
    rows: Sequence[Row], place: Place, figure: str = "accuracy", *, as_error: bool = False
) -> dict[Cell, SeedMeans]:
    """Return one value per seed for every method and column that has a measurement.

    Only seeds that ran on the same streams are averaged: those with most of them, of equals those of the earliest.
    """
    placed = [
        {**row, "cell": found[0], "stream": found[1], "value": 100 - row[figure] if as_error else row[figure]}
        for row in rows
        if (found := place(row)) is not None
    ]
    grouped = frame(placed).groupby(["label", "cell"], sort=False) if placed else ()
    return {(str(label), str(cell)): _cell(members) for (label, cell), members in grouped}


def _cell(streams: pd.DataFrame) -> SeedMeans:
    """Return the mean over the streams of a cell, for each seed that has all of them.

    Two experiments that would fill the same cell are refused: their mean would be neither's.
    """
    units = streams.drop_duplicates(["seed", "stream", "unit"])
    for (seed, _), same in units[units.duplicated(["seed", "stream"], keep=False)].groupby(["seed", "stream"]):
        first, other = same.iloc[0], same.iloc[1]
        raise SettingError(
            f"{first['label']}: the sections {first['section']!r} and {other['section']!r} both measured "
            f"{other['dataset']}/{other['domains'][0]} with seed {seed}; keep one of them in the experiment file"
        )
    once = streams.drop_duplicates(["seed", "stream"])
    table = once.pivot(index="seed", columns="stream", values="value")
    there = table.notna()
    fullest: Any = there.sum(axis=1).idxmax()
    values = table[there.eq(there.loc[fullest]).all(axis=1)].mean(axis=1)
    images = int(once.loc[once["seed"] == fullest, "n"].sum())
    return SeedMeans(values, images, int(there.loc[fullest].sum()))


def _values(table: Table, names: Sequence[str], cells: Mapping[Cell, SeedMeans]) -> Values:
    """Return every measured figure: cells, averages over the seeds that all their columns share, gains."""
    found = dict(cells)
    expected = dict.fromkeys(table.columns, table.layout.streams)
    for column, members in table.averages.items():
        expected[column] = sum(expected[member] for member in members)
        for name in names:
            if present := [found[name, member] for member in members if (name, member) in found]:
                shared = pd.concat([member.values for member in present], axis=1, join="inner").sort_index()
                images, parts = (sum(getattr(member, count) for member in present) for count in ("images", "parts"))
                if len(shared):
                    found[name, column] = SeedMeans(shared.mean(axis=1), images, parts)
    values = {}
    for (name, column), (means, images, parts) in found.items():
        if column in expected:
            deviation = float(means.std()) if len(means) > 1 else None
            seeds = tuple(map(int, means.index))
            values[name, column] = Measured(float(means.mean()), deviation, seeds, images, parts, expected[column])
    return values | _gains(table, names, values)


def _gains(table: Table, names: Sequence[str], values: Values) -> Values:
    """Return by how much each row is better than the one it is compared with."""
    found = {}
    for (column, gain), name in product(table.improvements.items(), names):
        reference = gain.reference(name)
        own, other = values.get((name, gain.column)), values.get((reference, gain.column))
        if own and other and reference != name and (own.parts, own.seeds) == (other.parts, other.seeds):
            better = other.value - own.value if table.metric == "error" else own.value - other.value
            found[name, column] = replace(own, value=better, deviation=None)
    return found


def column_group(column: str) -> str:
    """Return the beginning of a name such as `cifar10_c/5` or `clipart->real`, empty for others."""
    beginning, *rest = re.split("/|->", column)
    return beginning if rest else ""


def _entries(
    table: Table, column: Column, names: Sequence[str], values: Values, marks: Mapping[Cell, tuple[str, ...]]
) -> list[Entry]:
    """Return a column with its best two among the measured and among the printed figures; a gain is not ranked."""
    places = [(name, column.name) for name in names]
    measured, printed = [values.get(place) for place in places], [table.cells.get(place) for place in places]
    widest = max((own.parts for own in measured if own), default=0)
    # A mean over fewer streams competes with nobody, nor does a figure that cannot be right.
    ours = [own.value if own and own.parts == widest else None for own in measured]
    theirs = [cell.value if cell and not cell.misprint else None for cell in printed]
    ranks = [_best_two(figures, table.metric, column) for figures in (ours, theirs)]
    return list(map(Entry, measured, printed, *ranks, [marks.get(place, ()) for place in places]))


def _best_two(figures: Sequence[float | None], metric: str, column: Column) -> list[int | None]:
    """Return the first and the second by the figures as shown; equals share a rank, and all equal have none."""
    shown = pd.Series(np.array(figures, dtype=float)).map(lambda value: round(value, column.digits))
    if column.signed or shown.nunique() < 2:
        return [None] * len(figures)
    ranks = shown.rank(method="dense", ascending=metric == "error")
    return [int(rank) if rank <= 2 else None for rank in ranks]


def _footnotes(table: Table) -> tuple[dict[Cell, tuple[str, ...]], tuple[Footnote, ...]]:
    """Return the marks of each cell and the notes that they refer to; equal notes share a mark."""
    names: dict[str, str] = {}
    marks = {}
    for (row, column), cell in table.cells.items():
        texts = [f"Misprint in the paper ({row}, {column}): {cell.misprint}."] if cell.misprint else []
        texts += [_LAST_DIGIT] if (row, column) in table.last_digit else []
        texts += [f"{row}, {column}: {note}" for note in cell.notes]
        if texts:
            marks[row, column] = tuple(names.setdefault(text, _MARKS[len(names)]) for text in texts)
    return marks, tuple(Footnote(mark, text) for text, mark in names.items())
