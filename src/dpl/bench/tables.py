"""Stored results as rows, as one pandas frame, and as tables of means over seeds and visits."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dpl.bench.run import Record
from dpl.bench.selection import Cell, chosen, complete, oracle
from dpl.bench.store import Store
from dpl.core.extras import optional

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["MeasuredTable", "cell_rows", "frame", "measured_tables"]


def cell_rows(cells: Iterable[Cell], store: Store) -> list[Record]:
    """Return one row per finished segment, with the settings that were chosen and, beside, the oracle's figure."""
    return [row for cell in cells if complete(cell, store) for row in _rows(cell, store)]


def _rows(cell: Cell, store: Store) -> list[Record]:
    picked, ideal = chosen(cell, store), oracle(cell, store)
    shared = {"section": cell.section, "label": cell.label, "chosen": dict(picked.values)}
    ideals: dict[tuple[str, int], float] = {}
    if ideal is not None:
        shared["oracle_chosen"] = dict(ideal.values)
        ideals = {_place(record): record["accuracy"] for record in store.records(ideal.target)}
    rows = []
    for record in store.records(picked.target):
        column = f"{cell.source}->{record['segment']}" if cell.source else record["segment"]
        beside = {"oracle_accuracy": ideals[_place(record)]} if ideals else {}
        rows.append(shared | {"column": column} | picked.target.record() | record | beside)
    return rows


def _place(record: Record) -> tuple[str, int]:
    return record["segment"], record["visit"]


def frame(rows: Sequence[Record]) -> "pd.DataFrame":
    """Return the rows as a frame: a line per finished segment, a column per field of its unit and its record."""
    made: pd.DataFrame = optional("pandas", "bench").DataFrame(rows)
    return made


@dataclass(frozen=True)
class MeasuredTable:
    """Accuracies in percent: a row per method, a column per segment and their average, each a mean over seeds."""

    section: str
    protocol: str
    means: "pd.DataFrame"
    images: int
    seeds: tuple[int, ...]
    regenerated: bool


def measured_tables(rows: Sequence[Record], figure: str = "accuracy") -> list[MeasuredTable]:
    """Return one table per section of the experiment file; the average needs every segment of a row."""
    if not rows:
        return []
    return [_table(str(name), part, figure) for name, part in frame(rows).groupby("section", sort=False)]


def _table(section: str, rows: "pd.DataFrame", figure: str) -> MeasuredTable:
    means = rows.groupby(["label", "column"], sort=False)[figure].mean().unstack()
    means = means.reindex(index=rows["label"].unique(), columns=rows["column"].unique())
    means["average"] = means.mean(axis=1, skipna=False)
    return MeasuredTable(
        section=section,
        protocol=_protocol(rows),
        means=means,
        images=int(rows.drop_duplicates(["column", "visit", "seed"])["n"].sum()),
        seeds=tuple(sorted(rows["seed"].unique().tolist())),
        regenerated=bool(rows["regenerated"].any()),
    )


def _protocol(rows: "pd.DataFrame") -> str:
    first, sizes = rows.iloc[0], sorted(rows["batch_size"].unique())
    part = f", {1 - first['holdout']:.0%} training split of each target domain" if first["part"] == "inside" else ""
    return f"{first['protocol']}{part}, batch {' or '.join(map(str, sizes))}"
