"""The paper's tables: run what can be run, put it beside the printed figures, write it down."""

from collections.abc import Sequence
from functools import partial

from dpl.bench.section import Section
from dpl.core.errors import DataError
from dpl.data.sets import normalise_name
from dpl.reproduce import paper
from dpl.reproduce.compare import column_group, compare, oracle
from dpl.reproduce.document import Document, Item, Setup
from dpl.reproduce.facts import differences, paper_notes, protocol_items, setting_items, version_lines
from dpl.reproduce.gather import Gathered, gather
from dpl.reproduce.layouts import LAYOUTS, Row
from dpl.reproduce.paper import Table
from dpl.reproduce.request import Request, Result
from dpl.reproduce.targets import experiment_file, register
from dpl.reproduce.write import write

__all__ = ["describe", "make_table"]


def make_table(name: str, request: Request) -> Result:
    """Run or resume a table's experiment and write the table."""
    table, layout = paper.load(name), LAYOUTS[name]
    path = experiment_file(name, request.config)
    gathered = gather(path, request, None if layout.open_rows else table.rows)
    rows = [row for row in gathered.rows if layout.place(row) is not None]
    if not rows:
        raise _nothing(name, request, gathered.missing)
    missing = (*gathered.missing, *_not_planned(table, gathered, path.name))
    document = describe(table, rows, missing, request)
    return Result(write(document, request.out), document, gathered.failed, missing)


def describe(table: Table, rows: Sequence[Row], missing: Sequence[Item], request: Request) -> Document:
    """Return the document of a table: a pure function of the printed figures, the measured rows and the request."""
    beside = oracle(table, rows)
    return Document(
        name=table.name,
        title=f"{table.name.replace('table', 'Table ').capitalize()}: {table.title}",
        grids=(compare(table, rows), *([beside] if beside else [])),
        differences=differences(table, rows),
        missing=tuple(Item(i.subject, request.anonymous(i.text), request.anonymous(i.drawing)) for i in missing),
        paper=tuple(Item(key, value) for key, value in table.protocol.items()),
        notes=paper_notes(table),
        setup=Setup(
            protocol=protocol_items(rows),
            settings=setting_items(rows),
            versions=version_lines(rows),
            command=request.anonymous(request.command),
        ),
    )


def _nothing(name: str, request: Request, missing: Sequence[Item]) -> DataError:
    """Say why there is no figure to show."""
    reasons = "".join(f"\n{item.lines()}" for item in missing)
    if not request.run:
        return DataError(
            f"--no-run: {request.store} holds no result of {name} with these settings; leave --no-run out to run it, "
            f"or name the folder of its results with --store{reasons}"
        )
    return DataError(f"{name}: nothing could be run{reasons}")


def _not_planned(table: Table, gathered: Gathered, file: str) -> list[Item]:
    """Return what the paper's table has and the experiment file does not ask for."""
    labels = {entry.label for section in gathered.sections for entry in section.methods}
    lacking = [row for row in table.rows if row not in labels]
    asked = {word for section in gathered.sections for word in _words(section)}
    groups = dict.fromkeys(
        column_group(c) or c for c in table.columns if c not in {*table.averages, *table.improvements}
    )
    if any(normalise_name(group) in asked for group in groups):  # columns are data sets or backbones, not domains
        lacking += [group for group in groups if normalise_name(group) not in asked]
    return [Item(", ".join(lacking), f"not in the experiment file {file}")] if lacking else []


def _words(section: Section) -> set[str]:
    """Return the names under which a section's columns may stand in a table."""
    corrupted = f"{section.dataset}_c" if section.corrupt is not None else section.dataset
    return {normalise_name(section.name), normalise_name(corrupted)}


for _name in paper.tables():
    if _name != "supervised":
        register(_name, paper.load(_name).title, partial(make_table, _name))
