"""A comparison as Markdown: two lines for each method, measured above reported."""

import re
from collections.abc import Iterable

from dpl.report.document import Document, Item
from dpl.report.grid import Grid, Text

__all__ = ["to_markdown"]

_SPECIAL = re.compile(r"([\\`*_{}\[\]<>|#~])")


def to_markdown(document: Document) -> str:
    """Return the whole document."""
    parts = [f"# {_escape(document.title)}", _escape(document.legend)]
    for number, grid in enumerate(document.grids):
        parts += [f"## {_escape(grid.title)}"] if number else []
        parts += [_table(grid), _footnotes(grid)]
    for title, items in document.sections():
        parts += [f"## {title}", "\n".join(map(_item, items))]
    return "\n\n".join(parts) + "\n"


def _escape(text: str) -> str:
    return _SPECIAL.sub(r"\\\1", text.replace("->", "→"))


def _item(item: Item) -> str:
    text = f"- {_escape(f'{item.subject}: ' if item.subject else '')}{_escape(item.text)}"
    if not item.drawing:
        return text
    drawing = "\n".join(f"  {line}".rstrip() for line in item.drawing.splitlines())
    return f"{text}:\n\n  ```text\n{drawing}\n  ```\n"


def _table(grid: Grid) -> str:
    lines = [_line(["method", "", *(_escape(column.name) for column in grid.columns)])]
    lines.append(_line(["---", "---", *["---:"] * len(grid.columns)]))
    for row in grid.rows:
        measured, reported = grid.texts(row)
        label = f" ({_escape(row.other_label)})" if row.other_label else ""
        lines.append(_line([_escape(row.name) + label, "measured", *map(_figure, measured)]))
        lines += [_line(["", "reported", *map(_figure, reported)])] if row.printed else []
    return "\n".join([*lines, _line(["images", "each seed", *grid.counts()])])


def _figure(text: Text | None) -> str:
    if text is None:
        return "–"
    figure = {1: f"**{text.figure}**", 2: f"_{text.figure}_"}.get(text.rank or 0, text.figure)
    deviation = f" ± {text.deviation}" if text.deviation else ""
    scope = ", ".join(word for word in (text.coverage, text.images) if word)
    marks = f" <sup>{','.join(text.marks)}</sup>" if text.marks else ""
    return figure + deviation + (f" ({scope})" if scope else "") + marks


def _footnotes(grid: Grid) -> str:
    notes = [f"<sup>{note.mark}</sup> {_escape(note.text)}" for note in grid.shown_footnotes]
    return "  \n".join(["**Bold**: best; _italic_: second best.", *notes, *map(_escape, grid.remarks)])


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"
