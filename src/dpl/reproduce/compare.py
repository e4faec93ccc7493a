"""A table of the paper with measured figures beside the printed ones: means, coverage, ranks, gains, footnotes."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from statistics import mode
from string import ascii_lowercase
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from dpl.bench.tables import frame
from dpl.core.errors import SettingError
from dpl.reproduce.paper import Figure, Place, Row, Table

__all__ = ["Column", "ComparisonTable", "compare", "oracle", "seed_means"]

Cell = tuple[str, str]  # method and column
Figures = Sequence[Figure | None]
Values = dict[Cell, Figure]
_MARKS = [*ascii_lowercase, *map("".join, product(ascii_lowercase, repeat=2))]  # a, b ... z, aa, ab ...
_WIDE = 8  # a table with more columns leaves out groups in which nothing was measured
_LAST_DIGIT = "The printed cells' mean rounds to another last digit; unrounded cells could give the printed one."


class SeedMeans(NamedTuple):
    """One value per seed, the mean over `parts` streams of so many images."""

    values: "pd.Series[float]"
    images: int
    parts: int


@dataclass(frozen=True)
class Column:
    """One column: `images` is the count behind most of its measured figures, None where nothing was measured."""

    name: str
    digits: int
    signed: bool
    images: int | None

    def text(self, figure: Figure) -> str:
        """Return a figure with the decimals of the column."""
        return f"{figure.value:{'+' if self.signed else ''}.{self.digits}f}"

    def scope(self, figure: Figure) -> str:
        """Return what went into a figure, where it is less or other than the column's."""
        coverage = f"{figure.parts}/{figure.expected}" if figure.parts != figure.expected else ""
        images = f"{figure.images:,} images" if figure.images not in (None, self.images) else ""
        return ", ".join(filter(None, (coverage, images)))


@dataclass(frozen=True)
class ComparisonRow:
    """One method, a figure for each column: `label` is its name in the paper, empty for one that the paper lacks."""

    name: str
    label: str
    measured: Figures
    reported: Figures


@dataclass(frozen=True)
class ComparisonTable:
    """A whole table as data, before any format."""

    name: str
    title: str
    metric: str
    columns: Sequence[Column]
    rows: Sequence[ComparisonRow]
    footnotes: Mapping[str, str]  # by their marks, those of columns that are shown
    left_out: Sequence[str] = ()  # groups of columns that are not shown because nothing of them was measured

    def lines(self) -> Iterator[tuple[str, str, str, Figures]]:
        """Yield of each method its name, the paper's where it differs, `measured`, the figures; then the paper's."""
        for row in self.rows:
            yield row.name, "" if row.label.lower() == row.name.lower() else row.label, "measured", row.measured
            if any(row.reported):
                yield "", "", "reported", row.reported


def oracle(table: Table, rows: Sequence[Row]) -> ComparisonTable | None:
    """Return the same table for the settings that were best on the target, None where they were not searched."""
    found = [row for row in rows if "oracle_accuracy" in row]
    title = f"{table.title}: with the settings that are best on the target (oracle)"
    return compare(table, found, "oracle_accuracy", title) if found else None


def compare(table: Table, rows: Sequence[Row], figure: str = "accuracy", title: str = "") -> ComparisonTable:
    """Return the table with measured figures beside the printed ones; methods that the paper lacks come last."""
    cells = seed_means(rows, table.layout.place, figure, as_error=table.metric == "error")
    extra = [name for name, _ in cells] if table.layout.open_rows else []
    names = tuple(dict.fromkeys((*table.rows, *extra)))
    values = _values(table, names, cells)
    groups = {_group(column) for name, column in values if name in names} - {""}
    narrow = len(table.columns) <= _WIDE or not groups
    shown = [name for name in table.columns if narrow or _group(name) in groups | {""}]
    printed, footnotes = _printed(table, shown)
    columns, measured, reported = [], [], []
    for name in shown:
        ours, theirs = ([found.get((row, name)) for row in names] for found in (values, printed))
        counts = [own.images for own in ours if own is not None]
        columns.append(Column(name, table.digits(name), name in table.improvements, mode(counts) if counts else None))
        measured.append(_ranked(ours, columns[-1], table.metric))
        reported.append(_ranked(theirs, columns[-1], table.metric))
    lines = zip(names, zip(*measured, strict=True), zip(*reported, strict=True), strict=True)
    body = [ComparisonRow(name, table.printed_as.get(name, ""), ours, theirs) for name, ours, theirs in lines]
    left_out = list(dict.fromkeys(_group(name) for name in table.columns if name not in shown))
    return ComparisonTable(table.name, title or table.title, table.metric, columns, body, footnotes, left_out)


def seed_means(
    rows: Sequence[Row], place: Place, figure: str = "accuracy", *, as_error: bool = False
) -> dict[Cell, SeedMeans]:
    """Return one value per seed for every method and column that has a measurement."""
    placed = [
        {**row, "cell": found[0], "stream": found[1], "value": 100 - row[figure] if as_error else row[figure]}
        for row in rows
        if (found := place(row)) is not None
    ]
    grouped = frame(placed).groupby(["label", "cell"], sort=False) if placed else ()
    return {(str(label), str(cell)): _cell(members) for (label, cell), members in grouped}


def _cell(streams: pd.DataFrame) -> SeedMeans:
    """Return the mean over the streams of a cell, for each seed that has all of them."""
    units = streams.drop_duplicates(["seed", "stream", "unit"])
    once = units.drop_duplicates(["seed", "stream"])
    if len(once) < len(units):  # the mean of two experiments would be neither's
        other = units.drop(once.index).iloc[0]
        first = once[(once["seed"] == other["seed"]) & (once["stream"] == other["stream"])].iloc[0]
        raise SettingError(
            f"{first['label']}: the sections {first['section']!r} and {other['section']!r} both measured "
            f"{other['dataset']}/{other['domains'][0]} with seed {other['seed']}; keep one of them in the "
            "experiment file"
        )
    table = once.pivot(index="seed", columns="stream", values="value")
    there = table.notna()  # only seeds that ran on the same streams are averaged: those with most, of equals the first
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
            mean, deviation = float(means.mean()), float(means.std()) if len(means) > 1 else None
            seeds = tuple(map(int, means.index))
            figure = Figure(mean, deviation, seeds=seeds, images=images, parts=parts, expected=expected[column])
            values[name, column] = figure
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


def _group(column: str) -> str:
    """Return the beginning of a name such as `cifar10_c/5` or `clipart->real`, empty for others."""
    beginning, *rest = re.split("/|->", column)
    return beginning if rest else ""


def _ranked(figures: Figures, column: Column, metric: str) -> Figures:
    """Return a column with ranks by the figures as shown: equals share one, all equal have none, nor has a gain."""
    widest = max((own.parts for own in figures if own is not None), default=0)
    # A mean over fewer streams competes with nobody, nor does a figure that cannot be right.
    comparable = [own.value if own and own.parts == widest and not own.misprint else np.nan for own in figures]
    shown = pd.Series(comparable, dtype=float).map(lambda value: round(value, column.digits))
    if column.signed or shown.nunique() < 2:
        return figures
    ranks = shown.rank(method="dense", ascending=metric == "error")
    return [
        replace(own, rank=int(rank)) if own and rank <= 2 else own for own, rank in zip(figures, ranks, strict=True)
    ]


def _printed(table: Table, shown: Sequence[str]) -> tuple[dict[Cell, Figure], dict[str, str]]:
    """Return the printed figures, and the notes on those that are shown by their marks; equal notes share a mark."""
    names: dict[str, str] = {}
    figures, used = {}, set[str]()
    for (row, column), cell in table.cells.items():
        texts = [f"Misprint in the paper ({row}, {column}): {cell.misprint}."] if cell.misprint else []
        texts += [_LAST_DIGIT] if (row, column) in table.last_digit else []
        texts += [f"{row}, {column}: {note}" for note in cell.notes]
        marks = tuple(names.setdefault(text, _MARKS[len(names)]) for text in texts)
        figures[row, column] = replace(cell, marks=marks)
        used |= set(marks) if column in shown else set()
    return figures, {mark: text for text, mark in names.items() if mark in used}
