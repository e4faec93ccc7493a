"""The figures printed in the paper, as data: one YAML file per table, misprints marked and never corrected.

>>> from dpl.reproduce import paper
>>> paper.load("table1").value("dpl_dagger", "pacs")
PrintedCell(value=89.9, deviation=0.39, misprint=None, notes=())

Rows are named like our methods, columns like our data sets. A printed average lists the columns it averages, and a
printed improvement the column and row it compares with, so that both can be recomputed from measured figures.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

import yaml

from dpl.core.errors import DataError, SettingError, did_you_mean
from dpl.reproduce.layouts import PLACES, Layout

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


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table of the paper: `accuracy` (higher is better) or `error` (lower is better), all in percent."""

    name: str
    title: str
    metric: str
    decimals: int
    protocol: Mapping[str, str]
    layout: Layout
    columns: tuple[str, ...]
    averages: Mapping[str, Sequence[str]]
    """The columns behind each average; an average of averages comes after them."""
    improvements: Mapping[str, Improvement]
    printed_as: Mapping[str, str]
    """The paper's names of the rows."""
    cells: Mapping[tuple[str, str], PrintedCell]
    last_digit: frozenset[tuple[str, ...]]
    """Averages whose last digit is not that of the printed cells' mean, though unrounded cells could give it."""
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

    def digits(self, column: str) -> int:
        """Return the decimals with which the column is printed; summaries always have one."""
        return 1 if column in self.averages or column in self.improvements else self.decimals


def tables() -> list[str]:
    """List the names that `load` knows: numbered tables, then what the text alone gives."""
    names = [entry.name.removesuffix(".yaml") for entry in files(__name__).iterdir() if entry.name.endswith(".yaml")]
    return sorted(names, key=lambda name: (not name.startswith("table"), name))


@cache
def load(table: str) -> Table:
    """Return the figures of `table`: `table1` to `table8`, or `supervised`."""
    if table not in tables():
        raise SettingError(f"the paper has no table {table!r}. {did_you_mean(table, tables())}")
    content = yaml.safe_load(files(__name__).joinpath(f"{table}.yaml").read_text(encoding="utf-8"))
    notes = tuple(Note(**note) for note in content["notes"])
    return Table(
        name=table,
        layout=Layout(**content["layout"] | {"place": PLACES[content["layout"]["place"]]}),
        columns=tuple(content["columns"]),
        averages=content.get("averages", {}),
        improvements={name: Improvement(**gain) for name, gain in content.get("improvements", {}).items()},
        cells=_cells(table, content, notes),
        last_digit=frozenset(map(tuple, content["last_digit"])),
        notes=notes,
        **{name: content[name] for name in ("title", "metric", "decimals", "protocol", "printed_as")},
    )


def _cells(table: str, content: Mapping[str, Any], notes: tuple[Note, ...]) -> dict[tuple[str, str], PrintedCell]:
    """Pair every printed figure with its row, its column and the marks set on it."""
    misprints = {(mark["row"], mark["column"]): mark["why"] for mark in content["misprints"]}
    cells: dict[tuple[str, str], PrintedCell] = {}
    columns = content["columns"]
    for row, figures in content["rows"].items():
        if len(figures) != len(columns):
            raise DataError(f"{table}.yaml: row {row!r} has {len(figures)} figures for {len(columns)} columns")
        for column, figure in zip(columns, figures, strict=True):
            if figure is not None:
                value, deviation = figure if isinstance(figure, list) else (figure, None)
                remarks = tuple(n.text for n in notes if (n.row, n.column) == (row, column))
                cells[row, column] = PrintedCell(value, deviation, misprints.get((row, column)), remarks)
    return cells
