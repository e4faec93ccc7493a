"""A comparison as one HTML file that needs no other: light or dark as the reader's system is."""

from collections.abc import Iterable
from html import escape

from dpl.reproduce.document import Document, Item
from dpl.reproduce.grid import Entry, Grid, GridRow, Text

__all__ = ["to_html"]

_STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --soft: #57606a; --line: #d0d7de; --paper: #ffffff; --band: #f6f8fa; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6edf3; --soft: #9198a1; --line: #3d444d; --paper: #0d1117; --band: #161b22; }
}
body { margin: 2rem auto; max-width: 90rem; padding: 0 1rem; color: var(--ink); background: var(--paper);
       font: 16px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: 0.875rem; font-variant-numeric: tabular-nums; }
th, td { padding: 0.15rem 0.6rem; text-align: right; white-space: nowrap; }
th[scope=row], th.kind, td.kind { text-align: left; }
thead th { border-bottom: 2px solid var(--line); position: sticky; top: 0; background: var(--paper); }
tbody { border-bottom: 1px solid var(--line); } tbody:hover { background: var(--band); }
th[scope=row] { font-family: ui-monospace, monospace; vertical-align: top; }
.soft, .reported td, .kind { color: var(--soft); }
.best { font-weight: 700; color: var(--ink); } .second { text-decoration: underline; color: var(--ink); }
small, .note, tfoot { color: var(--soft); } .note { font-size: 0.875rem; margin: 0.2rem 0; }
pre { background: var(--band); border: 1px solid var(--line); padding: 0.6rem; overflow-x: auto; font-size: 0.8rem; }
li { overflow-wrap: anywhere; }
"""


def to_html(document: Document) -> str:
    """Return the whole page."""
    title = escape(document.title)
    parts = [f"<h1>{title}</h1>", f"<p>{escape(document.legend)}</p>"]
    for number, grid in enumerate(document.grids):
        parts += [f"<h2>{escape(grid.title)}</h2>"] if number else []
        parts += [_table(grid), *_footnotes(grid)]
    for heading, items in document.sections():
        parts += [f"<h2>{escape(heading)}</h2>", "<ul>", *map(_item, items), "</ul>"]
    head = (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{title}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n"
    )
    return head + "\n".join(parts) + "\n</body>\n</html>\n"


def _text(text: str) -> str:
    return escape(text.replace("->", "→"))


def _item(item: Item) -> str:
    subject = f"<strong>{_text(item.subject)}</strong>: " if item.subject else ""
    drawing = f":<pre>{escape(item.drawing)}</pre>" if item.drawing else ""
    return f"<li>{subject}{_text(item.text)}{drawing}</li>"


def _table(grid: Grid) -> str:
    names = "".join(f'<th scope="col">{_text(column.name)}</th>' for column in grid.columns)
    counts = "".join(f"<td>{count}</td>" for count in grid.counts())
    return "\n".join(
        [
            '<div class="scroll"><table>',
            f'<thead><tr><th class="kind">method</th><th class="kind"></th>{names}</tr></thead>',
            *(_rows(grid, row) for row in grid.rows),
            f'<tfoot><tr><th scope="row">images</th><td class="kind">each seed</td>{counts}</tr></tfoot>',
            "</table></div>",
        ]
    )


def _rows(grid: Grid, row: GridRow) -> str:
    """Return the lines of a method as a body of their own, which no pointer divides."""
    measured, reported = grid.texts(row)
    label = f' <span class="soft">({_text(row.other_label)})</span>' if row.other_label else ""
    hints = map(_hint, row.entries)
    above = "".join(f"<td{hint}>{_figure(text)}</td>" for text, hint in zip(measured, hints, strict=True))
    below = "".join(f"<td>{_figure(text)}</td>" for text in reported)
    head = f'<th scope="row" rowspan="{1 + row.printed}">{_text(row.name)}{label}</th>'
    second = f'\n<tr class="reported"><td class="kind">reported</td>{below}</tr>' if row.printed else ""
    return f'<tbody>\n<tr>{head}<td class="kind">measured</td>{above}</tr>{second}\n</tbody>'


def _hint(entry: Entry) -> str:
    """Return the tool tip of a measured figure."""
    found = entry.measured
    if found is None:
        return ""
    seeds = ", ".join(map(str, found.seeds))
    text = f"{found.parts} of {found.expected} streams, {found.images:,} images each seed, seeds {seeds}"
    return f' title="{escape(text)}"'


def _figure(text: Text | None) -> str:
    if text is None:
        return "–"
    kind = {1: "best", 2: "second"}.get(text.rank or 0)
    figure = f'<span class="{kind}">{text.figure}</span>' if kind else text.figure
    deviation = f" <small>± {text.deviation}</small>" if text.deviation else ""
    scope = ", ".join(word for word in (text.coverage, text.images) if word)
    marks = f"<sup>{','.join(text.marks)}</sup>" if text.marks else ""
    return figure + deviation + (f" <small>({scope})</small>" if scope else "") + marks


def _footnotes(grid: Grid) -> Iterable[str]:
    yield '<p class="note"><b class="best">Bold</b>: best; <span class="second">underlined</span>: second best.</p>'
    for note in grid.shown_footnotes:
        yield f'<p class="note"><sup>{note.mark}</sup> {_text(note.text)}</p>'
    for remark in grid.remarks:
        yield f'<p class="note">{_text(remark)}</p>'
