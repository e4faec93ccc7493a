"""Stored results as rows and tables: measured figures with their counts, seeds and protocol."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from dpl.bench.selection import Cell, chosen, complete, oracle
from dpl.bench.store import Store

__all__ = ["MeasuredTable", "cell_rows", "measured_tables"]

Row = dict[str, Any]


@dataclass(frozen=True)
class MeasuredTable:
    """Accuracies in percent: a row per method, a column per segment and their average, each a mean over seeds."""

    section: str
    protocol: str
    columns: tuple[str, ...]
    rows: dict[str, tuple[float | None, ...]]
    images: int
    seeds: tuple[int, ...]
    regenerated: bool


def cell_rows(cells: Iterable[Cell], store: Store) -> list[Row]:
    """Return one row per finished segment, with the settings that were chosen and, beside, the oracle's figure."""
    return [row for cell in cells if complete(cell, store) for row in _rows(cell, store)]


def _rows(cell: Cell, store: Store) -> list[Row]:
    picked, ideal = chosen(cell, store), oracle(cell, store)
    ideals = {} if ideal is None else {_place(r): r["accuracy"] for r in store.records(ideal.target)}
    shared = {"section": cell.section, "label": cell.label, "chosen": dict(picked.values)}
    if ideal is not None:
        shared["oracle_chosen"] = dict(ideal.values)
    rows = []
    for record in store.records(picked.target):
        column = f"{cell.source}->{record['segment']}" if cell.source else record["segment"]
        beside = {"oracle_accuracy": ideals[_place(record)]} if ideals else {}
        rows.append(shared | {"column": column} | picked.target.record() | record | beside)
    return rows


def _place(record: Row) -> tuple[str, int]:
    return record["segment"], record["visit"]


def measured_tables(rows: Sequence[Row], figure: str = "accuracy") -> list[MeasuredTable]:
    """Return one table per section of the experiment file."""
    sections = dict.fromkeys(row["section"] for row in rows)
    return [_table(section, [row for row in rows if row["section"] == section], figure) for section in sections]


def _table(section: str, rows: Sequence[Row], figure: str) -> MeasuredTable:
    columns = tuple(dict.fromkeys(row["column"] for row in rows))
    labels = dict.fromkeys(row["label"] for row in rows)
    cells: dict[tuple[str, str], list[float]] = {}
    for row in rows:
        cells.setdefault((row["label"], row["column"]), []).append(row[figure])
    lines = {}
    for label in labels:
        values = [fmean(cells[label, column]) if (label, column) in cells else None for column in columns]
        known = [value for value in values if value is not None]
        lines[label] = (*values, fmean(known) if len(known) == len(columns) else None)
    return MeasuredTable(
        section=section,
        protocol=_protocol(rows),
        columns=(*columns, "average"),
        rows=lines,
        images=sum({(row["column"], row["visit"], row["seed"]): row["n"] for row in rows}.values()),
        seeds=tuple(sorted({row["seed"] for row in rows})),
        regenerated=any(row["regenerated"] for row in rows),
    )


def _protocol(rows: Sequence[Row]) -> str:
    row, sizes = rows[0], sorted({row["batch_size"] for row in rows})
    part = f", {1 - row['holdout']:.0%} in-split of each target domain" if row["part"] == "inside" else ""
    return f"{row['protocol']}{part}, batch {' or '.join(map(str, sizes))}"
