"""Stored results as rows, as one pandas frame, and as tables: the one place where accuracies are averaged."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from dpl.bench.run import Record
from dpl.bench.store import Store, chosen, complete, oracle
from dpl.bench.unit import Cell
from dpl.core.extras import optional

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["AVERAGE", "cell_rows", "frame", "measured_tables", "over_seeds"]

AVERAGE = "average"


def cell_rows(cells: Iterable[Cell], store: Store) -> list[Record]:
    """Return one row per finished segment, with the settings that were chosen and, beside, the oracle's figure."""
    return [row for cell in cells if complete(cell, store) for row in _rows(cell, store)]


def _rows(cell: Cell, store: Store) -> list[Record]:
    picked, ideal = chosen(cell, store), oracle(cell, store)
    shared: Record = {"section": cell.section, "label": cell.label, "chosen": dict(picked.values)}
    rows = [picked.target.record() | record for record in store.records(picked.target)]
    if ideal is not None:
        shared["oracle_chosen"] = dict(ideal.values)
        for row, best in zip(rows, store.records(ideal.target), strict=True):
            row["oracle_accuracy"] = best["accuracy"]
    prefix = f"{cell.source}->" if cell.source else ""
    return [shared | {"column": f"{prefix}{row['segment']}"} | row for row in rows]


def frame(rows: Sequence[Any]) -> "pd.DataFrame":
    """Return the rows as a frame: a line per finished segment, a column per field of its unit and its record."""
    return optional("pandas", "bench").DataFrame(rows)  # type: ignore[no-any-return]


def over_seeds(rows: "pd.DataFrame", column: str = "column") -> "tuple[pd.DataFrame, pd.DataFrame]":
    """Return means and sample deviations over seeds: a line per label, a column per stream, last their average.

    Visits are averaged, then streams with equal weights, then seeds; an average needs every stream of a seed.
    """
    by_visit = rows["accuracy"].astype(float).groupby([rows["label"], rows["seed"], rows[column]], sort=False)
    values = by_visit.mean().unstack().reindex(columns=rows[column].unique())
    values[AVERAGE] = values.mean(axis=1, skipna=False)
    by_label = values.groupby("label", sort=False)
    labels = rows["label"].unique()
    return by_label.mean().reindex(labels), by_label.std().reindex(labels)


def measured_tables(rows: Sequence[Record]) -> "list[tuple[str, pd.DataFrame]]":
    """Return for each section of the file how it was measured, as a title, and its mean accuracies in percent."""
    sections = frame(rows).groupby("section", sort=False) if rows else ()
    return [(_title(str(name), part), over_seeds(part)[0]) for name, part in sections]


def _title(section: str, rows: "pd.DataFrame") -> str:
    first, sizes, seeds = rows.iloc[0], sorted(rows["batch_size"].unique()), sorted(rows["seed"].unique())
    part = f", {1 - first['holdout']:.0%} training split of each target domain" if first["part"] == "inside" else ""
    made = ", regenerated corruptions" if rows["regenerated"].any() else ""
    images = rows.drop_duplicates(["column", "visit", "seed"])["n"].sum()
    protocol = f"{first['protocol']}{part}, batch {' or '.join(map(str, sizes))}{made}"
    seeded = f"{'seeds' if len(seeds) > 1 else 'seed'} {', '.join(map(str, seeds))}"
    return f"{section}: online accuracy in percent, {protocol}, {images:,} images, {seeded}"
