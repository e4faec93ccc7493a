"""The figures printed in the paper, as data: one YAML file per table, misprints marked and never corrected.

>>> from dpl.reproduce import paper
>>> paper.load("table1").cells["dpl_dagger", "pacs"].value
89.9

Rows are named like our methods, columns like our data sets. A printed average lists the columns it averages, and a
printed improvement the column and row it compares with, so that both can be recomputed from measured figures. The
layout says where a measured stream belongs.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import Any, NamedTuple

import yaml

from dpl.bench.domains import CLEAN, CORRUPTED, DOMAINS
from dpl.core.errors import SettingError, did_you_mean
from dpl.data.facts import CORRUPTIONS
from dpl.data.sets import normalise_name

__all__ = ["PLACES", "Figure", "Layout", "Place", "Row", "Table", "load", "network_name", "tables"]

Row = Mapping[str, Any]  # one finished segment as `dpl.bench.cell_rows` returns it
Place = Callable[[Row], tuple[str, str] | None]  # returns column and stream of a measured row, None: it has no place
_BACKBONES = {"resnet18": "resnet18", "vit_base_patch16": "vit_b16", "mixer_b16": "mixer_b16"}


@dataclass(frozen=True)
class Layout:
    """What a table or figure shows where: the entry `layout` of a table's file."""

    place: Place
    streams: int = 1  # streams whose mean is one figure
    open_rows: bool = True  # whether methods that the paper's table lacks are shown too
    networks: Mapping[str, str] = field(default_factory=dict)  # the paper's, by the beginning of the column's name
    selected: bool = False  # whether the paper chose settings on source validation
    seeds: int | None = 3  # seeds behind the paper's figures; None where it does not say

    def network(self, row: Row) -> str | None:
        """Return the paper's network for a measured row, None where the paper has no figure."""
        column, _ = self.place(row) or ("", "")
        return next((own for start, own in self.networks.items() if column.startswith(start)), None)


@dataclass(frozen=True)
class Figure:
    """A figure in percent, printed or measured: then the mean over seeds of the mean over streams."""

    value: float
    deviation: float | None = None  # of a measured one the sample standard deviation over seeds; None for one seed
    rank: int | None = None  # 1 for the best of the column, 2 for the second best
    misprint: str | None = None  # what is known to be wrong with a printed one
    notes: tuple[str, ...] = ()  # on a printed one; `marks` are their footnotes
    marks: tuple[str, ...] = ()
    seeds: tuple[int, ...] = ()
    images: int | None = None  # predictions behind a measured one, for one seed
    parts: int = 0  # streams (domains, corruptions) that went in
    expected: int = 0  # streams that the paper's figure stands for


class Note(NamedTuple):
    """A remark on a cell; without a column on a whole row, without both on the table."""

    text: str
    row: str | None = None
    column: str | None = None


class Improvement(NamedTuple):
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
    columns: Sequence[str]
    averages: Mapping[str, Sequence[str]]  # the columns behind each average; an average of averages comes after them
    improvements: Mapping[str, Improvement]
    printed_as: Mapping[str, str]  # the paper's names of the rows
    cells: Mapping[tuple[str, str], Figure]
    last_digit: frozenset[tuple[str, ...]]  # averages with another last digit than the printed cells' mean
    notes: Sequence[Note]

    @property
    def rows(self) -> tuple[str, ...]:
        """The row names in printed order."""
        return tuple(dict.fromkeys(row for row, _ in self.cells))

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
    layout, gains, misprints = content["layout"], content.pop("improvements", {}), content.pop("misprints")
    why = {(mark["row"], mark["column"]): mark["why"] for mark in misprints}
    notes = [Note(**note) for note in content["notes"]]
    cells: dict[tuple[str, str], Figure] = {}
    for row, figures in content.pop("rows").items():
        for column, figure in zip(content["columns"], figures, strict=True):
            if figure is not None:
                value, deviation = figure if isinstance(figure, list) else (figure, None)
                remarks = tuple(note.text for note in notes if (note.row, note.column) == (row, column))
                cells[row, column] = Figure(value, deviation, misprint=why.get((row, column)), notes=remarks)
    read = {
        "layout": Layout(**layout | {"place": PLACES[layout["place"]]}),
        "improvements": {name: Improvement(**gain) for name, gain in gains.items()},
        "last_digit": frozenset(map(tuple, content["last_digit"])),
    }
    return Table(**{"name": table, "averages": {}} | content | read | {"cells": cells, "notes": notes})


def network_name(network: str) -> str:
    """Return a network's name without where it comes from and which weights it had."""
    return network.removeprefix("torchvision/").split(".")[0]


def _by_severity(row: Row) -> tuple[str, str] | None:
    """One column per data set and severity, the mean over the usual fifteen corruptions, on disk or regenerated."""
    regenerated = row["dataset"] in CLEAN and row["corrupt"] is not None
    corrupted = (regenerated or row["dataset"] in CORRUPTED) and row["severity"] is not None
    if not corrupted or row["domains"][0] not in CORRUPTIONS:
        return None
    return f"{row['dataset']}{'_c' if regenerated else ''}/{row['severity']}", row["domains"][0]


def _by_corruption(row: Row) -> tuple[str, str] | None:
    place = _by_severity(row)
    return (place[1], place[1]) if place and place[0] == "imagenet_c/5" else None


def _by_backbone(row: Row) -> tuple[str, str] | None:
    name = network_name(row["network"])
    backbone = next((ours for beginning, ours in _BACKBONES.items() if name.startswith(beginning)), None)
    domain = row["domains"][0]
    return (f"{backbone}/{domain}", domain) if row["dataset"] == "pacs" and backbone else None


# By the word that a table's file uses; of data sets of domains a column is the mean over the targets.
PLACES: Mapping[str, Place] = {
    "dataset": lambda row: (normalise_name(row["dataset"]), row["domains"][0]) if row["dataset"] in DOMAINS else None,
    "pair": lambda row: (row["column"],) * 2 if row["dataset"] == "domainnet126" and "->" in row["column"] else None,
    "corruption": _by_corruption,
    "severity": _by_severity,
    "backbone": _by_backbone,
    "set": lambda row: (row["dataset"], row["domains"][0]),
}
