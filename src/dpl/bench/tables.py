"""Stored results as rows, as one pandas frame, and as tables: the one place where accuracies are averaged."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from dpl.bench.run import Record
from dpl.bench.selection import Cell, chosen, complete, oracle
from dpl.bench.store import Store
from dpl.core.extras import optional

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["AVERAGE", "MeasuredTable", "OverSeeds", "cell_rows", "frame", "measured_tables", "over_seeds"]

AVERAGE = "average"


def cell_rows(cells: Iterable[Cell], store: Store) -> list[Record]:
    """Return one row per finished segment, with the settings that were chosen and, beside, the oracle's figure."""
    return [row for cell in cells if complete(cell, store) for row in _rows(cell, store)]


def _rows(cell: Cell, store: Store) -> list[Record]:
    picked, ideal = chosen(cell, store), oracle(cell, store)
    shared: Record = {"section": cell.section, "label": cell.label, "chosen": dict(picked.values)}
    records = store.records(picked.target)
    beside: list[Record] = [{} for _ in records]
    if ideal is not None:
        shared["oracle_chosen"] = dict(ideal.values)
        beside = [{"oracle_accuracy": record["accuracy"]} for record in store.records(ideal.target)]
    prefix = f"{cell.source}->" if cell.source else ""
    return [
        shared | {"column": f"{prefix}{record['segment']}"} | picked.target.record() | record | more
        for record, more in zip(records, beside, strict=True)
    ]


def frame(rows: Sequence[Any]) -> "pd.DataFrame":
    """Return the rows as a frame: a line per finished segment, a column per field of its unit and its record."""
    made: pd.DataFrame = optional("pandas", "bench").DataFrame(rows)
    return made


class OverSeeds(NamedTuple):
    """Mean and sample standard deviation over seeds: a line per label, a column per stream, last their average."""

    means: "pd.DataFrame"
    deviations: "pd.DataFrame"


def over_seeds(rows: "pd.DataFrame", column: str = "column", figure: str = "accuracy") -> OverSeeds:
    """Average visits, then streams with equal weights, then seeds; an average needs every stream of a seed."""
    by_visit = rows.assign(**{figure: rows[figure].astype(float)}).groupby(["label", "seed", column], sort=False)
    values = by_visit[figure].mean().unstack().reindex(columns=rows[column].unique())
    values[AVERAGE] = values.mean(axis=1, skipna=False)
    by_label = values.groupby("label", sort=False)
    labels = rows["label"].unique()
    return OverSeeds(by_label.mean().reindex(labels), by_label.std().reindex(labels))


@dataclass(frozen=True)
class MeasuredTable:
    """Accuracies in percent of one section of an experiment file."""

    section: str
    protocol: str
    means: "pd.DataFrame"
    deviations: "pd.DataFrame"
    images: int
    seeds: tuple[int, ...]
    regenerated: bool
    nll: "pd.DataFrame | None" = None
    """Mean negative log-likelihood of the true class, of runs that kept it; None if not one did."""


def measured_tables(rows: Sequence[Record]) -> list[MeasuredTable]:
    """Return one table per section of the experiment file."""
    if not rows:
        return []
    return [_table(str(name), part) for name, part in frame(rows).groupby("section", sort=False)]


def _table(section: str, rows: "pd.DataFrame") -> MeasuredTable:
    return MeasuredTable(
        section,
        _protocol(rows),
        *over_seeds(rows),
        images=int(rows.drop_duplicates(["column", "visit", "seed"])["n"].sum()),
        seeds=tuple(sorted(rows["seed"].unique().tolist())),
        regenerated=bool(rows["regenerated"].any()),
        nll=over_seeds(rows, figure="nll").means if "nll" in rows and rows["nll"].notna().any() else None,
    )


def _protocol(rows: "pd.DataFrame") -> str:
    first, sizes = rows.iloc[0], sorted(rows["batch_size"].unique())
    part = f", {1 - first['holdout']:.0%} training split of each target domain" if first["part"] == "inside" else ""
    return f"{first['protocol']}{part}, batch {' or '.join(map(str, sizes))}"
