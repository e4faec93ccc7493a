r"""A comparison as LaTeX: a `table*` to `\input` into any standard class, and the lists below it; no package needed."""

from collections.abc import Iterable

from dpl.reproduce.document import Document, Item
from dpl.reproduce.grid import Grid, GridRow, Text

__all__ = ["to_latex"]

_ESCAPES = {
    "\\": r"\textbackslash{}", "{": r"\{", "}": r"\}", "$": r"\$", "&": r"\&", "#": r"\#", "%": r"\%", "_": r"\_",
    "^": r"\textasciicircum{}", "~": r"\textasciitilde{}", "<": "$<$", ">": "$>$", "|": "$|$", '"': "''",
    "±": r"$\pm$", "→": r"$\rightarrow$", "–": "--", "×": r"$\times$",
}  # fmt: skip


def to_latex(document: Document) -> str:
    """Return the whole document."""
    parts = [_table(grid, document.legend, number) for number, grid in enumerate(document.grids)]
    for title, items in document.sections():
        heading = rf"{{\footnotesize\noindent {_escape(title)}:"
        parts.append("\n".join([heading, r"\begin{itemize}", *map(_item, items), r"\end{itemize}}"]))
    return "\n\n".join(parts) + "\n"


def _escape(text: str) -> str:
    return "".join(_ESCAPES.get(character, character) for character in text.replace("->", "→"))


def _item(item: Item) -> str:
    text = rf"  \item {_escape(f'{item.subject}: ' if item.subject else '')}{_escape(item.text)}"
    if not item.drawing:
        return text
    return text + ":" + "".join(rf"\\{_drawn(line)}" for line in item.drawing.splitlines())


def _drawn(line: str) -> str:
    """Return a line of a drawing with its indent: spaces at its beginning would vanish."""
    indent = (len(line) - len(line.lstrip())) / 2
    return rf"\hspace*{{{indent:g}em}}\texttt{{{_escape(line.strip())}}}"


def _table(grid: Grid, legend: str, number: int) -> str:
    return "\n".join(
        [
            r"\begin{table*}",
            rf"\caption{{{_escape(grid.title)}. {_escape(legend)}}}",
            rf"\label{{tab:{grid.name}{f'-{number + 1}' if number else ''}}}",
            r"\centering\scriptsize\setlength{\tabcolsep}{3pt}",
            rf"\begin{{tabular}}{{ll{'r' * len(grid.columns)}}}",
            r"\hline",
            _line(["method", "", *(_escape(column.name) for column in grid.columns)]),
            r"\hline",
            *(line for row in grid.rows for line in _rows(grid, row)),
            r"\hline",
            _line(["images", "each seed", *map(_escape, grid.counts())]),
            r"\hline",
            r"\end{tabular}",
            r"\par\smallskip\raggedright",
            _footnotes(grid),
            r"\end{table*}",
        ]
    )


def _rows(grid: Grid, row: GridRow) -> list[str]:
    """Return the lines of a method."""
    measured, reported = grid.texts(row)
    label = f" ({_escape(row.other_label)})" if row.other_label else ""
    above = _line([rf"\texttt{{{_escape(row.name)}}}{label}", "measured", *map(_figure, measured)])
    return [above, _line(["", r"\textit{reported}", *map(_figure, reported)])] if row.printed else [above]


def _figure(text: Text | None) -> str:
    if text is None:
        return "--"
    figure = {1: rf"\textbf{{{text.figure}}}", 2: rf"\underline{{{text.figure}}}"}.get(text.rank or 0, text.figure)
    deviation = rf"$\pm${text.deviation}" if text.deviation else ""
    scope = ", ".join(word for word in (text.coverage, text.images) if word)
    marks = rf"\textsuperscript{{{','.join(text.marks)}}}" if text.marks else ""
    return figure + deviation + (f" ({scope})" if scope else "") + marks


def _footnotes(grid: Grid) -> str:
    legend = r"\textbf{Bold}: best; \underline{underlined}: second best."
    notes = [rf"\textsuperscript{{{note.mark}}} {_escape(note.text)}" for note in grid.shown_footnotes]
    return " ".join([legend, *notes, *map(_escape, grid.remarks)])


def _line(cells: Iterable[str]) -> str:
    return rf"{' & '.join(cells)} \\"
