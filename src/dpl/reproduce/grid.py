"""A comparison as data, before any format: what was measured beside what the paper prints, cell by cell."""

from dataclasses import dataclass

from dpl.reproduce.paper import Cell

__all__ = ["Column", "Entry", "Footnote", "Grid", "GridRow", "Measured", "Text"]


@dataclass(frozen=True)
class Measured:
    """A figure in percent: over seeds, the mean and the standard deviation of the mean over streams."""

    value: float
    deviation: float | None
    """Sample standard deviation over seeds; None for one seed."""
    seeds: tuple[int, ...]
    images: int
    """Predictions behind the figure, for one seed."""
    parts: int
    """Streams (domains, corruptions) that went in."""
    expected: int
    """Streams that the paper's figure stands for."""

    @property
    def complete(self) -> bool:
        """Whether nothing is missing that the paper's figure has."""
        return self.parts == self.expected


@dataclass(frozen=True)
class Footnote:
    """A mark on a printed figure, and what it says."""

    mark: str
    text: str


@dataclass(frozen=True)
class Entry:
    """One cell; a rank is 1 for the best of the column, 2 for the second best, None for the others."""

    measured: Measured | None
    reported: Cell | None
    measured_rank: int | None = None
    reported_rank: int | None = None
    marks: tuple[str, ...] = ()
    """Footnotes on the printed figure."""


@dataclass(frozen=True)
class Column:
    """One column: `images` is the count behind most of its measured figures, None where nothing was measured."""

    name: str
    digits: int
    signed: bool = False
    images: int | None = None


@dataclass(frozen=True)
class GridRow:
    """One method: `label` is its name in the paper, empty for a method that the paper's table lacks."""

    name: str
    label: str
    entries: tuple[Entry, ...]

    @property
    def printed(self) -> bool:
        """Whether the paper prints any of its figures; a method of one's own has one line instead of two."""
        return any(entry.reported for entry in self.entries)

    @property
    def other_label(self) -> str:
        """The paper's name of the method where it is another one than ours."""
        return "" if self.label.lower() == self.name.lower() else self.label


@dataclass(frozen=True)
class Grid:
    """A whole table."""

    name: str
    title: str
    metric: str
    columns: tuple[Column, ...]
    rows: tuple[GridRow, ...]
    footnotes: tuple[Footnote, ...]
    left_out: tuple[str, ...] = ()
    """Groups of columns that are not shown because nothing of them was measured."""

    @property
    def measured(self) -> bool:
        """Whether there is any measured figure."""
        return any(entry.measured for row in self.rows for entry in row.entries)

    @property
    def shown_footnotes(self) -> list[Footnote]:
        """The footnotes whose mark stands in a column that is shown."""
        marks = {mark for row in self.rows for entry in row.entries for mark in entry.marks}
        return [note for note in self.footnotes if note.mark in marks]

    @property
    def remarks(self) -> list[str]:
        """What is said of the table as a whole, below it."""
        return (
            [f"Columns left out, since nothing was measured for them: {', '.join(self.left_out)}."]
            if self.left_out
            else []
        )

    def counts(self) -> list[str]:
        """Return the number of images behind each column."""
        return ["–" if column.images is None else f"{column.images:,}" for column in self.columns]

    def texts(self, row: GridRow) -> "tuple[list[Text | None], list[Text | None]]":
        """Return the two lines of a method: measured and printed figures."""
        pairs = list(zip(row.entries, self.columns, strict=True))
        return [_measured_text(*pair) for pair in pairs], [_reported_text(*pair) for pair in pairs]


@dataclass(frozen=True)
class Text:
    """A figure in words that every format can dress: `82.1`, `0.32`, `3/4` of the streams, rank, footnote marks."""

    figure: str
    deviation: str = ""
    coverage: str = ""
    images: str = ""
    """How many there were, where it is not the column's number."""
    rank: int | None = None
    marks: tuple[str, ...] = ()


def _measured_text(entry: Entry, column: Column) -> Text | None:
    """Return what is shown for a measured figure, None where there is none."""
    found = entry.measured
    if found is None:
        return None
    deviation = "" if found.deviation is None else f"{found.deviation:.2f}"
    coverage = "" if found.complete else f"{found.parts}/{found.expected}"
    images = "" if found.images == column.images else f"{found.images:,} images"
    return Text(_figure(found.value, column), deviation, coverage, images, entry.measured_rank)


def _reported_text(entry: Entry, column: Column) -> Text | None:
    """Return what is shown for a printed figure, None where the paper prints none."""
    cell = entry.reported
    if cell is None:
        return None
    deviation = "" if cell.deviation is None else f"{cell.deviation:.2f}"
    return Text(_figure(cell.value, column), deviation, rank=entry.reported_rank, marks=entry.marks)


def _figure(value: float, column: Column) -> str:
    return f"{value:{'+' if column.signed else ''}.{column.digits}f}"
