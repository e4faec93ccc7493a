"""A document as text: Markdown and LaTeX from templates, JSON from its fields; written whole or not at all."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from dpl.core.files import write_file
from dpl.reproduce.document import Document

__all__ = ["Picture", "latex", "render", "write"]

FORMATS = ("md", "tex", "json")
_MARKDOWN = re.compile(r"([\\`*_{}\[\]<>|#~])")
_LATEX = {
    "\\": r"\textbackslash{}", "{": r"\{", "}": r"\}", "$": r"\$", "&": r"\&", "#": r"\#", "%": r"\%", "_": r"\_",
    "^": r"\textasciicircum{}", "~": r"\textasciitilde{}", "<": "$<$", ">": "$>$", "|": "$|$", '"': "''",
    "±": r"$\pm$", "→": r"$\rightarrow$", "–": "--", "×": r"$\times$",
}  # fmt: skip


@dataclass(frozen=True)
class Picture:
    """A drawing, what it shows in words, and the numbers behind it."""

    figure: Any
    alt: str
    headers: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    """A small table of what is drawn."""
    data: Mapping[str, Any]
    """Every drawn value, unrounded."""
    claim: str = ""
    """What the paper shows in its figure."""


def render(document: Document, suffix: str, picture: Picture | None = None) -> str:
    """Return the document in the format of a file's suffix; a figure has a page in Markdown and JSON."""
    if suffix == "json":
        shown = {"claim": picture.claim, "alt": picture.alt, "data": dict(picture.data)} if picture else {}
        return json.dumps(document.record() | shown, indent=1, default=lambda array: array.tolist()) + "\n"
    return _environment(suffix).get_template(f"table.{suffix}.j2").render(document=document, picture=picture)


def write(document: Document, folder: Path, picture: Picture | None = None) -> tuple[Path, ...]:
    """Write a table as `<name>.md`, `.tex` and `.json` into a folder, the page of a figure as `.md` and `.json`."""
    suffixes = ("md", "json") if picture else FORMATS
    return tuple(write_file(folder / f"{document.name}.{s}", render(document, s, picture)) for s in suffixes)


@cache
def _environment(suffix: str) -> Environment:
    # LaTeX is full of braces, so that its template marks what is filled in by << >> and <% %>.
    marks: dict[str, Any] = {
        "variable_start_string": "<<", "variable_end_string": ">>", "block_start_string": "<%",
        "block_end_string": "%>", "comment_start_string": "<#", "comment_end_string": "#>",
    } if suffix == "tex" else {}  # fmt: skip
    environment = Environment(
        loader=PackageLoader("dpl.reproduce", "templates"),
        autoescape=False,  # noqa: S701 - no format is HTML; filters escape what Markdown and LaTeX would misread
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        **marks,
    )
    environment.filters |= {"markdown": _markdown, "latex": latex, "latex_line": _latex_line}
    return environment


def _arrow(text: str) -> str:
    return text.replace("->", "→")


def _markdown(text: str) -> str:
    """Return a text that Markdown shows unchanged."""
    return _MARKDOWN.sub(r"\\\1", _arrow(text))


def latex(text: str) -> str:
    """Return a text that LaTeX shows unchanged."""
    return "".join(_LATEX.get(character, character) for character in _arrow(text))


def _latex_line(line: str) -> str:
    """Return a line of a drawing with its indent: spaces at its beginning would vanish."""
    indent = (len(line) - len(line.lstrip())) / 2
    return rf"\hspace*{{{indent:g}em}}\texttt{{{latex(line.strip())}}}"
