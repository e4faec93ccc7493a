"""The figures printed in the paper, as data: one YAML file per table, misprints marked and never corrected.

>>> from dpl.reproduce import paper
>>> paper.load("table1").value("dpl_dagger", "pacs")
PrintedCell(value=89.9, deviation=0.39, misprint=None, notes=())

Rows are named like our methods, columns like our data sets. A printed average lists the columns it averages, and a
printed improvement the column and row it compares with, so that both can be recomputed from measured figures.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from types import MappingProxyType
from typing import Any

import yaml

from dpl.core.errors import DataError, SettingError, did_you_mean

__all__ = ["Improvement", "Note", "PrintedCell", "Table", "load", "tables"]


@dataclass(frozen=True)
class PrintedCell:
    """One printed figure in percent, with its printed deviation and what is known to be wrong with it."""

    value: float
    deviation: float | None = None
    misprint: str | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Note:
    """A remark on a cell; without a column on a whole row, without both on the table."""

    text: str
    row: str | None = None
    column: str | None = None


@dataclass(frozen=True)
class Improvement:
    """A printed gain: how much better `column` is than in the row `over` (`partner`: X, for a row X+dpl)."""

    column: str
    over: str

    def reference(self, row: str) -> str:
        """Name the row that `row` is compared with."""
        return row.rpartition("+")[0] if self.over == "partner" else self.over


@dataclass(frozen=True)
class Table:
    """A table of the paper: `accuracy` (higher is better) or `error` (lower is better), all in percent."""

    name: str
    title: str
    metric: str
    decimals: int
    protocol: Mapping[str, str]
    columns: tuple[str, ...]
    averages: Mapping[str, tuple[str, ...]]
    improvements: Mapping[str, Improvement]
    printed_as: Mapping[str, str]
    cells: Mapping[tuple[str, str], PrintedCell]
    # Averages whose last digit is not that of the printed cells' mean, though unrounded cells could give it.
    last_digit: frozenset[tuple[str, str]]
    notes: tuple[Note, ...]

    @property
    def rows(self) -> tuple[str, ...]:
        """The row names in printed order."""
        return tuple(dict.fromkeys(row for row, _ in self.cells))

    def value(self, row: str, column: str) -> PrintedCell | None:
        """Return the printed cell, or None where the paper prints nothing (also for a method it lacks)."""
        if column not in self.columns:
            raise SettingError(f"{self.name} has no column {column!r}. {did_you_mean(column, self.columns)}")
        return self.cells.get((row, column))

    def label(self, row: str) -> str:
        """Return the name under which the paper prints the row."""
        return self.printed_as[row]

    def digits(self, column: str) -> int:
        """Return the decimals with which the column is printed; summaries always have one."""
        return 1 if column in self.averages or column in self.improvements else self.decimals


def tables() -> list[str]:
    """List the names that `load` knows."""
    names = (entry.name for entry in files(__name__).iterdir())
    return sorted((n.removesuffix(".yaml") for n in names if n.endswith(".yaml")), key=_printed_order)


@cache
def load(table: str) -> Table:
    """Return the figures of `table`: `table1` to `table8`, or `supervised`."""
    if table not in tables():
        raise SettingError(f"the paper has no table {table!r}. {did_you_mean(table, tables())}")
    content = yaml.safe_load(files(__name__).joinpath(f"{table}.yaml").read_text(encoding="utf-8"))
    columns = tuple(content["columns"])
    notes = tuple(Note(**note) for note in content["notes"])
    return Table(
        name=table,
        title=content["title"],
        metric=content["metric"],
        decimals=content["decimals"],
        protocol=MappingProxyType(content["protocol"]),
        columns=columns,
        averages=MappingProxyType({name: tuple(of) for name, of in content.get("averages", {}).items()}),
        improvements=MappingProxyType(
            {name: Improvement(**of) for name, of in content.get("improvements", {}).items()}
        ),
        printed_as=MappingProxyType(content["printed_as"]),
        cells=MappingProxyType(_cells(table, content, columns, notes)),
        last_digit=frozenset((row, column) for row, column in content["last_digit"]),
        notes=notes,
    )


def _cells(
    table: str, content: Mapping[str, Any], columns: tuple[str, ...], notes: tuple[Note, ...]
) -> dict[tuple[str, str], PrintedCell]:
    """Pair every printed figure with its row, its column and the marks set on it."""
    misprints = {(mark["row"], mark["column"]): mark["why"] for mark in content["misprints"]}
    cells: dict[tuple[str, str], PrintedCell] = {}
    for row, figures in content["rows"].items():
        if len(figures) != len(columns):
            raise DataError(f"{table}.yaml: row {row!r} has {len(figures)} figures for {len(columns)} columns")
        for column, figure in zip(columns, figures, strict=True):
            if figure is None:
                continue
            value, deviation = figure if isinstance(figure, list) else (figure, None)
            remarks = tuple(n.text for n in notes if (n.row, n.column) == (row, column))
            cells[row, column] = PrintedCell(value, deviation, misprints.get((row, column)), remarks)
    return cells


def _printed_order(name: str) -> tuple[bool, str]:
    """Sort numbered tables first; what the text alone gives comes after."""
    return not name.startswith("table"), name
