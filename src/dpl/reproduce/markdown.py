"""A comparison as Markdown: two lines for each method, measured above reported."""

import re
from collections.abc import Iterable

from dpl.reproduce.document import Document, Item
from dpl.reproduce.grid import Grid, Text

__all__ = ["escape", "item_text", "table_line", "to_markdown"]

_SPECIAL = re.compile(r"([\\`*_{}\[\]<>|#~])")


def to_markdown(document: Document) -> str:
    """Return the whole document."""
    parts = [f"# {escape(document.title)}", escape(document.legend)]
    for number, grid in enumerate(document.grids):
        parts += [f"## {escape(grid.title)}"] if number else []
        parts += [_table(grid), _footnotes(grid)]
    for title, items in document.sections():
        parts += [f"## {title}", "\n".join(map(item_text, items))]
    return "\n\n".join(parts) + "\n"


def escape(text: str) -> str:
    """Return a text that Markdown shows as it stands."""
    return _SPECIAL.sub(r"\\\1", text.replace("->", "→"))


def item_text(item: Item) -> str:
    """Return an entry of a list."""
    text = f"- {escape(f'{item.subject}: ' if item.subject else '')}{escape(item.text)}"
    if not item.drawing:
        return text
    drawing = "\n".join(f"  {line}".rstrip() for line in item.drawing.splitlines())
    return f"{text}:\n\n  ```text\n{drawing}\n  ```\n"


def _table(grid: Grid) -> str:
    lines = [table_line(["method", "", *(escape(column.name) for column in grid.columns)])]
    lines.append(table_line(["---", "---", *["---:"] * len(grid.columns)]))
    for row in grid.rows:
        measured, reported = grid.texts(row)
        label = f" ({escape(row.other_label)})" if row.other_label else ""
        lines.append(table_line([escape(row.name) + label, "measured", *map(_figure, measured)]))
        lines += [table_line(["", "reported", *map(_figure, reported)])] if row.printed else []
    return "\n".join([*lines, table_line(["images", "each seed", *grid.counts()])])


def _figure(text: Text | None) -> str:
    if text is None:
        return "–"
    figure = {1: f"**{text.figure}**", 2: f"_{text.figure}_"}.get(text.rank or 0, text.figure)
    deviation = f" ± {text.deviation}" if text.deviation else ""
    scope = ", ".join(word for word in (text.coverage, text.images) if word)
    marks = f" <sup>{','.join(text.marks)}</sup>" if text.marks else ""
    return figure + deviation + (f" ({scope})" if scope else "") + marks


def _footnotes(grid: Grid) -> str:
    notes = [f"<sup>{note.mark}</sup> {escape(note.text)}" for note in grid.shown_footnotes]
    return "  \n".join(["**Bold**: best; _italic_: second best.", *notes, *map(escape, grid.remarks)])


def table_line(cells: Iterable[str]) -> str:
    """Return one line of a table."""
    return f"| {' | '.join(cells)} |"
