"""From a table of the paper and measured rows to a grid: a pure function of the two."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from string import ascii_lowercase

from dpl.reproduce.grid import Column, Entry, Footnote, Grid, GridRow, Measured
from dpl.reproduce.layouts import LAYOUTS, Row
from dpl.reproduce.paper import Improvement, Table
from dpl.reproduce.series import Series, collect, mean_of

__all__ = ["column_group", "compare", "oracle"]

_WIDE = 8  # a table with more columns leaves out groups in which nothing was measured
_LAST_DIGIT = "The printed cells' mean rounds to another last digit; unrounded cells could give the printed one."

Values = dict[tuple[str, str], Measured]


def compare(table: Table, rows: Sequence[Row]) -> Grid:
    """Return the table with measured figures beside the printed ones.

    Rows are those of the paper, then methods that only the experiment has, where the table is open to them. An average
    counts the streams that went in, and a gain is computed where both its figures stand for the same streams.
    """
    return _compare(table, rows, table.title, lambda row: row["accuracy"])


def oracle(table: Table, rows: Sequence[Row]) -> Grid | None:
    """Return the same table for the settings that were best on the target, None where they were not looked for."""
    found = [row for row in rows if "oracle_accuracy" in row]
    title = f"{table.title}: with the settings that are best on the target (oracle)"
    return _compare(table, found, title, lambda row: row["oracle_accuracy"]) if found else None


def _compare(table: Table, rows: Sequence[Row], title: str, accuracy: Callable[[Row], float]) -> Grid:
    layout = LAYOUTS[table.name]

    def value(row: Row) -> float:
        return 100 - accuracy(row) if table.metric == "error" else accuracy(row)

    leaves = collect(rows, layout, value)
    extra = [name for name in dict.fromkeys(name for name, _ in leaves) if name not in table.rows]
    names = (*table.rows, *(extra if layout.open_rows else ()))
    values = _values(table, names, leaves, layout.streams)
    marks, footnotes = _footnotes(table)
    columns = [_column(table, column, names, values) for column in table.columns]
    entries = {name: [_entry(table, name, column.name, values, marks) for column in columns] for name in names}
    _rank(table, columns, entries)
    kept = _kept(columns)
    body = tuple(GridRow(name, table.printed_as.get(name, ""), tuple(entries[name][i] for i in kept)) for name in names)
    left_out = tuple(dict.fromkeys(column_group(c.name) for i, c in enumerate(columns) if i not in kept))
    return Grid(table.name, title, table.metric, tuple(columns[i] for i in kept), body, footnotes, left_out)


def _values(
    table: Table, names: Sequence[str], leaves: Mapping[tuple[str, str], Series], streams: int
) -> dict[tuple[str, str], Measured]:
    """Return every measured figure: cells, averages, gains."""

    def size(column: str) -> int:
        return sum(map(size, table.averages[column])) if column in table.averages else streams

    def series(name: str, column: str) -> Series | None:
        if column not in table.averages:
            return leaves.get((name, column))
        return mean_of([series(name, member) for member in table.averages[column]], size(column))

    plain = [column for column in table.columns if column not in table.improvements]
    values = {(n, c): found.summary() for n in names for c in plain if (found := series(n, c)) is not None}
    for column, gain in table.improvements.items():
        values |= _gains(table.metric, names, column, gain, values)
    return values


def _gains(metric: str, names: Sequence[str], column: str, gain: Improvement, values: Values) -> Values:
    """Return by how much each row is better than the one it is compared with."""
    found = {}
    for name in names:
        reference = gain.reference(name)
        own, other = values.get((name, gain.column)), values.get((reference, gain.column))
        if own is None or other is None or reference == name or own.parts != other.parts or own.seeds != other.seeds:
            continue
        better = other.value - own.value if metric == "error" else own.value - other.value
        found[name, column] = replace(own, value=better, deviation=None)
    return found


def _column(table: Table, name: str, rows: Sequence[str], values: Values) -> Column:
    counts = Counter(values[row, name].images for row in rows if (row, name) in values)
    images = counts.most_common(1)[0][0] if counts else None
    return Column(name, table.digits(name), name in table.improvements, images)


def _entry(
    table: Table, row: str, column: str, values: Values, marks: Mapping[tuple[str, str], tuple[str, ...]]
) -> Entry:
    return Entry(values.get((row, column)), table.value(row, column), marks=marks.get((row, column), ()))


def _footnotes(table: Table) -> tuple[dict[tuple[str, str], tuple[str, ...]], tuple[Footnote, ...]]:
    """Return the marks of each cell and the notes that they stand for; equal notes share a mark."""
    names: dict[str, str] = {}
    marks = {}
    for (row, column), cell in table.cells.items():
        texts = [f"Misprint in the paper ({row}, {column}): {cell.misprint}."] if cell.misprint else []
        texts += [_LAST_DIGIT] if (row, column) in table.last_digit else []
        texts += [f"{row}, {column}: {note}" for note in cell.notes]
        for text in texts:
            names.setdefault(text, _letter(len(names)))
        if texts:
            marks[row, column] = tuple(names[text] for text in texts)
    return marks, tuple(Footnote(mark, text) for text, mark in names.items())


def _letter(number: int) -> str:
    """Return a, b ... z, aa, ab ..."""
    first, last = divmod(number, len(ascii_lowercase))
    return (ascii_lowercase[first - 1] if first else "") + ascii_lowercase[last]


def _rank(table: Table, columns: Sequence[Column], entries: dict[str, list[Entry]]) -> None:
    """Mark the best and the second best of each column, measured and printed, each among their own."""
    for i, column in enumerate(columns):
        if column.signed:
            continue
        cells = {name: row[i] for name, row in entries.items()}
        widest = max((cell.measured.parts for cell in cells.values() if cell.measured), default=0)
        # A mean over fewer streams competes with nobody, nor does a figure that cannot be right.
        measured = {n: c.measured.value for n, c in cells.items() if c.measured and c.measured.parts == widest}
        printed = {n: c.reported.value for n, c in cells.items() if c.reported and not c.reported.misprint}
        ours, theirs = (_ranks(figures, table.metric, column.digits) for figures in (measured, printed))
        for name, row in entries.items():
            row[i] = replace(row[i], measured_rank=ours.get(name), reported_rank=theirs.get(name))


def _ranks(figures: Mapping[str, float], metric: str, digits: int) -> dict[str, int]:
    """Return who is first and second by the figures as they are shown; equals share a rank, and all equal have none."""
    shown = {name: round(value, digits) for name, value in figures.items()}
    order = sorted(set(shown.values()), reverse=metric == "accuracy")
    if len(order) < 2:
        return {}
    return {name: order.index(value) + 1 for name, value in shown.items() if value in order[:2]}


def _kept(columns: Sequence[Column]) -> list[int]:
    """Return which columns are shown: all, or of a wide table those of groups in which something was measured."""
    groups = {column_group(column.name) for column in columns if column.images is not None} - {""}
    everything = list(range(len(columns)))
    if len(columns) <= _WIDE or not groups:
        return everything
    return [i for i in everything if column_group(columns[i].name) in groups | {""}]


def column_group(column: str) -> str:
    """Return the beginning of a name such as `cifar10_c/5` or `clipart->real`, empty for others."""
    for separator in ("/", "->"):
        if separator in column:
            return column.split(separator)[0]
    return ""
