"""The paper's tables: run what can be run, put it beside the printed figures, write it down."""

from collections.abc import Sequence
from typing import Any

from dpl.bench.section import Section
from dpl.data.sets import normalise_name
from dpl.reproduce import paper
from dpl.reproduce.compare import column_group, compare, oracle
from dpl.reproduce.document import Document, Item
from dpl.reproduce.layouts import Row
from dpl.reproduce.paper import Table
from dpl.reproduce.plan import nothing_measured, run_experiment
from dpl.reproduce.render import write
from dpl.reproduce.targets import Request, Result, experiment_file

__all__ = ["make_document", "make_table"]


def make_table(name: str, request: Request) -> Result:
    """Run or resume a table's experiment and write the table."""
    table = paper.load(name)
    path = experiment_file(name, request.config)
    experiment = run_experiment(path, request, None if table.layout.open_rows else table.rows)
    rows = [row for row in experiment.rows if table.layout.place(row) is not None]
    if not rows:
        raise nothing_measured(name, request, experiment.missing)
    missing = (*experiment.missing, *_not_planned(table, experiment.sections, path.name))
    document = make_document(table, rows, missing, request)
    return Result(write(document, request.out), document, experiment.failed, missing)


def make_document(
    table: Table, rows: Sequence[Row], missing: Sequence[Item], request: Request, **more: Any
) -> Document:
    """Return the document of a table: a pure function of the printed figures, the measured rows and the request."""
    number = f"Table {table.name.removeprefix('table')}: " if table.name.startswith("table") else ""
    beside = oracle(table, rows)
    return request.document(
        table.name,
        f"{number}{table.title}",
        rows,
        table.layout,
        missing,
        grids=(compare(table, rows), *([beside] if beside else [])),
        paper=tuple(Item(key, value) for key, value in table.protocol.items()),
        # Remarks on single cells are footnotes.
        notes=tuple(Item(note.row or "", note.text) for note in table.notes if note.column is None),
        **more,
    )


def _not_planned(table: Table, sections: Sequence[Section], file: str) -> list[Item]:
    """Return what the paper's table has and the experiment file does not ask for."""
    labels = {entry.label for section in sections for entry in section.methods}
    lacking = [row for row in table.rows if row not in labels]
    asked = {name for section in sections for name in _column_names(section)}
    summaries = {*table.averages, *table.improvements}
    groups = dict.fromkeys(column_group(c) or c for c in table.columns if c not in summaries)
    if any(normalise_name(group) in asked for group in groups):  # columns are data sets or backbones, not domains
        lacking += [group for group in groups if normalise_name(group) not in asked]
    return [Item(", ".join(lacking), f"not in the experiment file {file}")] if lacking else []


def _column_names(section: Section) -> set[str]:
    """Return the names under which a section's columns may stand in a table."""
    corrupted = f"{section.dataset}_c" if section.corrupt is not None else section.dataset
    return {normalise_name(section.name), normalise_name(corrupted)}
